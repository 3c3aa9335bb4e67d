"""Drawing tokens from logits. Every draw depends on its own row only, so batch and place do not matter.

Order, as in vLLM: end tokens masked until `min_tokens`; repetition penalty over prompt and output, frequency and
presence penalties over output; temperature; min-p; top-k; top-p over what is left, renormalized. The draw is the
inverse CDF in token-id order of what is kept, at u = Philox(seed, choice, output position). Ties of probability
are kept in favour of the lower token id. Log probabilities are those of the model's raw distribution, before all
of this.

Whatever the logits and the parameters, some token is drawn: what a penalty drives out of range stays at its end, and
NaN counts as the least likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from moonpool.engine.engine import Draw, Row, draw_alone
from moonpool.wire.messages import Sampling

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

COLD = 1e-5
"""Below this temperature a draw is greedy."""
HOT = 1e5
"""Above this temperature a draw is as good as uniform already."""
FAR = np.float32(1e30)
"""Logits are held within this, in which differences divided by any temperature from COLD to HOT are finite."""
_U64 = (1 << 64) - 1


def draw(rows: Sequence[Row], logits: torch.Tensor, ends: frozenset[int]) -> list[Draw]:
    """One token a row. `logits`: [len(rows), vocabulary] float32, left unchanged; `ends`: the model's end tokens."""
    if not rows:
        return []
    best: list[int] = logits.argmax(-1).tolist()
    return [draw_alone(partial(_one, row, sampling_of(row), logits[i], best[i], ends)) for i, row in enumerate(rows)]


def sampling_of(row: Row) -> Sampling:
    if row.sampling is None:
        raise ValueError("a row without `sampling` draws nothing")
    return row.sampling


def position_of(row: Row) -> int:
    """The output position, from 0, of the token that follows the row."""
    return row.start + row.count - row.prompt_tokens


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1): the first double of Philox4x64 with key (seed, choice) and counter word 1 = position."""
    key = np.array([seed & _U64, choice & _U64], np.uint64)
    counter = np.array([0, position & _U64, 0, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def _one(row: Row, sampling: Sampling, logits: torch.Tensor, best: int, ends: frozenset[int]) -> Draw:
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends)
    barred = stops if position_of(row) < sampling.min_tokens else frozenset()
    token = best if _plain(sampling) and not barred else _sample(row, sampling, logits.cpu().numpy().copy(), barred)
    drawn = Draw(token, is_end=token in stops)
    if sampling.logprobs is not None:
        _add_logprobs(drawn, logits, sampling.logprobs)
    return drawn


def _greedy(sampling: Sampling) -> bool:
    return sampling.temperature < COLD


def _plain(sampling: Sampling) -> bool:
    """Greedy and nothing that could change the best token."""
    return _greedy(sampling) and not _penalized(sampling)


def _penalized(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _sample(row: Row, sampling: Sampling, logits: Floats, barred: frozenset[int]) -> int:
    if _penalized(sampling):
        _penalize(row, sampling, logits)
    logits = _within_range(logits)
    logits[[token for token in barred if 0 <= token < len(logits)]] = -np.inf
    if _greedy(sampling):
        return int(logits.argmax())
    return pick(logits, sampling, uniform(sampling.seed, sampling.choice, position_of(row)))


@np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
def _penalize(row: Row, sampling: Sampling, logits: Floats) -> None:
    end = row.start + row.count
    output = np.array(row.tokens[row.prompt_tokens : end], np.int64)
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.concatenate((np.array(row.tokens[: row.prompt_tokens], np.int64), output)))
        values, factor = logits[seen], np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty == 0 and sampling.frequency_penalty == 0:
        return
    counts = np.bincount(output, minlength=len(logits))[: len(logits)]
    logits -= (sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)).astype(np.float32)


def _within_range(logits: Floats) -> Floats:
    clipped: Floats = np.fmin(np.fmax(logits, -FAR), FAR)  # of a number and NaN these take the number
    return clipped


def pick(logits: Floats, sampling: Sampling, u: float) -> int:
    """The token at u of the distribution that temperature, min-p, top-k and top-p leave of `logits` [vocabulary]."""
    logits = _within_range(logits)
    weights = np.exp((logits - logits.max()) / np.float32(min(max(sampling.temperature, COLD), HOT)))
    ids: Ids | None = None
    if sampling.min_p > 0:  # the best token's weight is 1
        ids = np.flatnonzero(weights >= sampling.min_p)
        weights = weights[ids]
    limited = 0 < sampling.top_k < len(weights)
    if limited or sampling.top_p < 1:
        best = np.sort(_best(weights, sampling.top_k if limited else len(weights), sampling.top_p))
        ids = best if ids is None else ids[best]
        weights = weights[best]
    cdf = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cdf, u * cdf[-1], side="right"))
    if index == len(cdf):  # u * sum was rounded up to the sum
        index = int(np.flatnonzero(weights)[-1])
    return index if ids is None else int(ids[index])


def _best(weights: Floats, top_k: int, top_p: float) -> Ids:
    """Indices of the `top_k` largest weights, of those the fewest that hold `top_p` of their sum (at least one)."""
    count = len(weights)
    if top_k < count:
        least = np.partition(weights, count - top_k)[count - top_k]
    else:  # all lighter ones together weigh less than the 1 - top_p to drop, so they need no sorting
        least = weights.dtype.type((1 - top_p) * weights.sum(dtype=np.float64) / count)
    candidates = np.flatnonzero(weights >= least)
    order = candidates[np.argsort(-weights[candidates], kind="stable")][:top_k]
    total = (weights[order] if top_k < count else weights).sum(dtype=np.float64)
    mass = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(np.searchsorted(mass, top_p * total, side="left")) + 1]


def _add_logprobs(drawn: Draw, logits: torch.Tensor, count: int) -> None:
    logprobs = logits.log_softmax(-1)
    drawn.logprob = float(logprobs[drawn.token])
    if count > 0:
        values, tokens = logprobs.topk(min(count, len(logprobs)))
        drawn.top = list(zip(tokens.tolist(), values.tolist(), strict=True))
