"""The kinds of synthetic traffic by name, with their parameters: `KIND?name=value&name=value`.

What the paper gives of its data sets is in them (PAPER §6, §8); what it does not give, the spread of lengths above all,
is a choice, and said to be one.
"""

from __future__ import annotations

import math
from urllib.parse import parse_qsl

from msgspec import Struct
from msgspec.structs import replace

from moonpool.errors import ConfigError
from moonpool.trace.synthesize import LONGEST_PROMPT, Family, Lengths, Synthetic

PREFIX = "synthetic:"
DOCUMENTS = 16


class Kind(Struct, frozen=True):
    about: str
    synthetic: Synthetic


def _simulated(thousands: int) -> Kind:
    """All prompts as long as the paper says; the documents that they are about are a choice."""
    family = Family(
        Lengths(1000.0 * thousands, most=1000.0 * thousands), Lengths(512.0), documents=DOCUMENTS, document_part=0.5
    )
    about = f"the paper's simulated data: {thousands}k tokens in, 512 out, half of each prompt shared (16 documents)"
    return Kind(about, Synthetic((family,)))


# The tool-and-agent trace (PAPER §8): shares, preambles and median answers are the paper's; lengths by family, pauses
# and how many conversations go on are chosen so that its mean lengths and the hit ratios of PAPER §2 come out.
CHAT = Family(
    Lengths(9640.0, 1.16, least=512.0),
    Lengths(379.0, 0.5, shape="normal", most=2000.0),
    share=0.46,
    preamble_blocks=1,
    going_on=0.29,
    pause=Lengths(420.0, 0.8, most=3600.0),
    added=Lengths(600.0, 1.0),
)
AGENT = Family(
    Lengths(6684.0, 1.0, least=6150.0),
    Lengths(28.0, 0.3, shape="normal", usual=3.0, usual_share=0.56),
    share=0.39,
    preamble_blocks=12,
)
TOOL = Family(Lengths(3166.0, 0.18, least=2600.0), Lengths(20.0, 0.1), share=0.15, preamble_blocks=5)

KINDS: dict[str, Kind] = {
    "poisson": Kind(
        "prompts and answers of any length, any part of them shared, in conversations of any number of turns",
        Synthetic((Family(Lengths(4000.0, 1.0), Lengths(250.0, 1.0, most=8000.0)),)),
    ),
    "arxiv-summarization": Kind(
        "as the paper's ArXiv Summarization: 8,088 tokens in, 229 out, nothing shared",
        Synthetic((Family(Lengths(8088.0, 0.5, most=32_000.0), Lengths(229.0, 0.4, most=2000.0)),)),
    ),
    "l-eval": Kind(
        "as the paper's L-Eval: 19,019 tokens in, 72 out, over 80 % cached (8 documents, 12 questions about each)",
        Synthetic(
            (
                Family(
                    Lengths(19_019.0, 0.4, most=100_000.0),
                    Lengths(72.0, 0.8, most=1000.0),
                    documents=8,
                    document_part=0.98,
                    document_uses=12.0,
                ),
            )
        ),
    ),
    "paper-16k": _simulated(16),
    "paper-32k": _simulated(32),
    "paper-64k": _simulated(64),
    "paper-128k": _simulated(128),
    "tool-and-agent": Kind(
        "statistics of the paper's tool-and-agent trace: three families, conversations, batches every 3 s",
        Synthetic((CHAT, AGENT, TOOL), requests=23_608, rate=23_608 / 3600, batch=3.05),
    ),
}


class Parameter(Struct, frozen=True):
    about: str
    least: float
    most: float
    is_whole: bool = False


COMMON: dict[str, Parameter] = {
    "n": Parameter("requests", 1, 10**9, is_whole=True),
    "rate": Parameter("requests a second", 1e-6, 1e6),
    "batch": Parameter("seconds between the times at which requests arrive together; 0: each at its own", 0, 1e6),
    "seed": Parameter("of all that is drawn", 0, 2**63, is_whole=True),
}
OF_ONE_FAMILY: dict[str, Parameter] = {
    "input": Parameter("mean tokens of a prompt", 1, LONGEST_PROMPT),
    "input-spread": Parameter("standard deviation over mean (lognormal); 0: all the same", 0, 10),
    "output": Parameter("mean tokens of an answer", 1, LONGEST_PROMPT),
    "output-spread": Parameter("standard deviation over mean (lognormal)", 0, 10),
    "shared": Parameter("part of each prompt that is shared with all about the same document", 0, 1),
    "documents": Parameter("alive at one time", 1, 10**6, is_whole=True),
    "uses": Parameter("prompts about a document, on average, until another takes its place; 0: for ever", 0, 1e9),
    "turns": Parameter("of a conversation, on average", 1, 1000),
    "pause": Parameter("mean seconds from one turn to the next", 1e-3, 1e6),
    "added": Parameter("mean tokens of a later turn beyond the last prompt and its answer", 1, LONGEST_PROMPT),
}
"""Only for kinds with one family of prompts."""


def parse_kind(text: str) -> Synthetic:
    """`KIND?name=value&name=value`. Raises ConfigError that names what there is."""
    name, _, query = text.partition("?")
    if name not in KINDS:
        raise ConfigError(f"no synthetic traffic {name!r}; choose one of {', '.join(KINDS)}")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError(f"{text!r}: must be {name}?name=value&name=value") from None
    return with_parameters(name, dict(pairs))


def with_parameters(name: str, given: dict[str, str]) -> Synthetic:
    """One of KINDS, its parameters replaced by those given. Raises ConfigError."""
    synthetic = KINDS[name].synthetic
    known = COMMON if len(synthetic.families) > 1 else COMMON | OF_ONE_FAMILY
    values: dict[str, float] = {}
    for key, word in given.items():
        if key not in known:
            raise ConfigError(f"{name} has no parameter {key!r}; it has {', '.join(known)}")
        values[key] = _number(f"{name}?{key}={word}", word, known[key])
    if any(key in OF_ONE_FAMILY for key in values):
        family = _family(synthetic.families[0], values)
        synthetic = replace(synthetic, families=(family,))
    return replace(
        synthetic,
        requests=int(values.get("n", synthetic.requests)),
        rate=values.get("rate", synthetic.rate),
        batch=values.get("batch", synthetic.batch),
        seed=int(values.get("seed", synthetic.seed)),
    )


def _number(what: str, word: str, parameter: Parameter) -> float:
    try:
        value: float = int(word) if parameter.is_whole else float(word)
    except ValueError:
        value = -1.0
    if not parameter.least <= value <= parameter.most:
        kind = "a whole number" if parameter.is_whole else "a number"
        raise ConfigError(f"{what}: must be {kind} from {parameter.least:g} to {parameter.most:g}")
    return value


def _family(family: Family, values: dict[str, float]) -> Family:
    part = values.get("shared", family.document_part)
    return replace(
        family,
        prompt=_lengths(family.prompt, values.get("input"), values.get("input-spread")),
        answer=_lengths(family.answer, values.get("output"), values.get("output-spread")),
        document_part=part,
        documents=int(values.get("documents", family.documents or DOCUMENTS)) if part else 0,
        document_uses=values.get("uses", family.document_uses) or math.inf,
        going_on=1 - 1 / values["turns"] if "turns" in values else family.going_on,
        pause=Lengths(values["pause"], 1.0, most=1e6) if "pause" in values else family.pause,
        added=Lengths(values["added"], 1.0) if "added" in values else family.added,
    )


def _lengths(lengths: Lengths, mean: float | None, deviation: float | None) -> Lengths:
    if mean is None and deviation is None:
        return lengths
    return Lengths(
        lengths.mean if mean is None else mean, lengths.deviation if deviation is None else deviation, least=0.0
    )
