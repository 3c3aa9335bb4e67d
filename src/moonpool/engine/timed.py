"""`TimedEngine`: no model, real bytes. It sleeps as long as its cost model says and moves KV like any engine.

Its "KV" is a pure function of the tokens: position i has a state, h(i) = mix(h(i-1) + (token + 1) * ODD), and the
bytes of K and V of each layer at that position are words mixed from it; the first word of layer 0's K is the state
itself, from which a later chunk goes on. The next token is a weighted sum over *all* bytes in the pages, so a block
that is wrong, swapped, stale or torn gives another token. `reference_tokens` says what is right.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from moonpool.core.blocks import key_space_id
from moonpool.core.cost import DecodeCoefficients, PrefillCoefficients
from moonpool.core.coupled import step_seconds
from moonpool.core.vocabulary import KeySpace
from moonpool.engine.engine import Bytes, Draw, Row, draw_alone
from moonpool.engine.pipeline import split_layers
from moonpool.wire.messages import Sampling

Words = npt.NDArray[np.uint64]

WORD = 8
ODD = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1
BEFORE_KV = 0.5
"""Of a layer's time: then its KV is there. What comes after (attention, the rest of the layer, at the end drawing) is
the other half."""


class TimedConfig(msgspec.Struct, frozen=True):
    """What the engine pretends to be. A token's KV is `layers * 2 * words_per_half * 8` bytes."""

    layers: int = 4
    words_per_half: int = 8
    """8-byte words of K, and of V, of one token in one layer."""
    vocabulary: int = 49_152
    context_tokens: int = 8192
    end_token: int | None = None
    """Ends a request when it happens to be drawn; None: every request runs to its max_tokens."""
    prefill: PrefillCoefficients = PrefillCoefficients()
    decode: DecodeCoefficients = DecodeCoefficients()


class TimedEngine:
    """See the module. `poison` fills pages with garbage at the start, as `poison_page` does."""

    def __init__(
        self,
        *,
        page_count: int,
        block_tokens: int = 64,
        config: TimedConfig | None = None,
        poison: bool = False,
        stage: tuple[int, int] = (0, 1),
    ) -> None:
        """`stage` (number, of so many): only this part of the layers, for `stage()`."""
        self.config = config = config or TimedConfig()
        self._block = block_tokens
        self._layers = split_layers(config.layers, stage[1])[stage[0]]
        shape = (len(self._layers), page_count, 2, block_tokens, config.words_per_half)
        self._memory: Words = np.zeros(shape, np.uint64)
        self._sums: dict[int, tuple[int, int, int]] = {}
        """Page -> (its index in the sequence, tokens summed, sum), as long as nobody asked for its bytes."""
        self.poison = poison
        self._space = _space(config, block_tokens)
        if poison:
            for page in range(page_count):
                self.poison_page(page)

    @property
    def space(self) -> KeySpace:
        return self._space

    @property
    def layers(self) -> range:
        return self._layers

    @property
    def takes_layers(self) -> bool:
        return True

    @property
    def page_count(self) -> int:
        return int(self._memory.shape[1])

    @property
    def context_tokens(self) -> int:
        return self.config.context_tokens

    def clear(self, page: int) -> None:
        self._sums.pop(page, None)
        self._memory[:, page] = 0

    def poison_page(self, page: int) -> None:
        self._sums.pop(page, None)
        self._memory[:, page] = 0xDEAD_BEEF

    def run(self, layer: int, page: int) -> Bytes:
        """A view to fill must be asked for anew each time: it makes the next step read the page's bytes again."""
        self._sums.pop(page, None)
        view: Bytes = self._memory[layer - self._layers.start, page].view(np.uint8).reshape(-1)
        return view

    def tail_runs(self, layer: int, page: int, tokens: int) -> tuple[Bytes, Bytes]:
        self._sums.pop(page, None)
        halves = self._memory[layer - self._layers.start, page, :, :tokens]
        return halves[0].view(np.uint8).reshape(-1), halves[1].view(np.uint8).reshape(-1)

    def step(self, rows: Sequence[Row], on_layer: Callable[[int], None] | None = None) -> list[Draw | None]:
        """See `Engine.step`. Takes the cost model's seconds, or what the hashing takes if that is more."""
        began = time.monotonic()
        ends = self._compute(began, rows, [self._states(row) for row in self._checked(rows)], on_layer)
        self._sum_tokens(rows)
        draws = [None if row.sampling is None else draw_alone(partial(self._draw, row, row.sampling)) for row in rows]
        _sleep_until(ends)
        return draws

    def hidden_bytes(self, tokens: int, rows: int) -> int:
        return (tokens + rows) * WORD

    def stage(
        self, rows: Sequence[Row], hidden: Bytes | None, on_layer: Callable[[int], None] | None = None
    ) -> Bytes | list[Draw | None]:
        """See `StageEngine.stage`; `hidden` has the states of all positions, then the sum so far of each row."""
        began = time.monotonic()
        if hidden is None:
            states, sums = [self._states(row) for row in self._checked(rows)], [0] * len(rows)
        else:
            words = hidden.view(np.uint64)
            borders = np.cumsum([row.count for row in self._checked(rows)])
            states = np.split(words[: borders[-1]], borders[:-1])
            sums = [int(word) for word in words[borders[-1] :]]
        ends = self._compute(began, rows, states, on_layer)
        drawing = [row.sampling is not None for row in rows]
        if self._layers.stop == self.config.layers:
            draws = [
                partial(self._draw, row, row.sampling, total)
                for row, total in zip(rows, sums, strict=True)
                if row.sampling
            ]
            drawn = iter([draw_alone(draw) for draw in draws])
            _sleep_until(ends)
            return [next(drawn) if draws_here else None for draws_here in drawing]
        sums = [
            self._sum(row, total) if draws_here else 0
            for row, total, draws_here in zip(rows, sums, drawing, strict=True)
        ]
        out: Bytes = np.concatenate([*states, np.array(sums, np.uint64)]).view(np.uint8)
        _sleep_until(ends)
        return out

    def _compute(
        self, began: float, rows: Sequence[Row], states: Sequence[Words], on_layer: Callable[[int], None] | None
    ) -> float:
        """KV of these states in the layers that are here, each when its time has come. When the step is to be over."""
        seconds = self._seconds(rows) / self.config.layers
        write_tokens = self._writer_of_tokens(rows, states)
        for number, layer in enumerate(self._layers):
            for row, of_row in zip(rows, states, strict=True):
                if row.count > 1:
                    self._write(layer, row, of_row)
            write_tokens(layer)
            if on_layer is not None:
                _sleep_until(began + seconds * (number + BEFORE_KV))
                on_layer(layer)
        return began + seconds * len(self._layers)

    def _checked(self, rows: Sequence[Row]) -> Sequence[Row]:
        for row in rows:
            self._check(row)
        return rows

    def _check(self, row: Row) -> None:
        end = row.start + row.count
        if row.count < 1 or row.start < 0 or end > len(row.tokens):
            raise ValueError(f"row computes tokens {row.start}..{end} of {len(row.tokens)}")
        if end > self.context_tokens:
            raise ValueError(f"row ends at token {end}, the context is {self.context_tokens}")
        if len(row.pages) * self._block < end:
            raise ValueError(f"row needs {end} tokens of pages and has {len(row.pages)} of {self._block}")

    def _seconds(self, rows: Sequence[Row]) -> float:
        """As a simulated worker's step takes: a row of one token is one of the decode batch."""
        decoding = [row for row in rows if row.count == 1]
        chunks = [row for row in rows if row.count > 1]
        context = sum(row.start + 1 for row in decoding)
        return step_seconds(self.config.prefill, self.config.decode, chunks, len(decoding), context)

    def _states(self, row: Row) -> Words:
        """[count] states of the row's positions, going on from what the page before says."""
        state = 0
        if row.start > 0:
            page, slot = divmod(row.start - 1, self._block)
            state = int(self._memory[0, row.pages[page], 0, slot, 0])
        states = np.empty(row.count, np.uint64)
        for index in range(row.count):
            state = mix((state + (row.tokens[row.start + index] + 1) * ODD) & MASK)
            states[index] = state
        return states

    def _write(self, layer: int, row: Row, states: Words) -> None:
        values = _kv(layer, states, self.config.words_per_half)
        done = 0
        while done < row.count:
            index, slot = divmod(row.start + done, self._block)
            count = min(self._block - slot, row.count - done)
            page = row.pages[index]
            if self._sums.get(page, (0, 0, 0))[1] > slot:
                del self._sums[page]
            self._memory[layer - self._layers.start, page, :, slot : slot + count] = values[:, done : done + count]
            done += count

    def _writer_of_tokens(self, rows: Sequence[Row], states: Sequence[Words]) -> Callable[[int], None]:
        """Writes a layer of all rows of one token at once: numpy takes as long for a batch as for one."""
        alone = [(row, state) for row, state in zip(rows, states, strict=True) if row.count == 1]
        if not alone:
            return lambda layer: None
        places = [divmod(row.start, self._block) for row, _ in alone]
        pages = [row.pages[index] for (row, _), (index, _) in zip(alone, places, strict=True)]
        slots = [slot for _, slot in places]
        for page, slot in zip(pages, slots, strict=True):
            if self._sums.get(page, (0, 0, 0))[1] > slot:
                del self._sums[page]
        words, width, first = (
            np.concatenate([state for _, state in alone]),
            self.config.words_per_half,
            self._layers.start,
        )

        def write(layer: int) -> None:
            self._memory[layer - first, pages, :, slots] = _kv(layer, words, width).swapaxes(0, 1)

        return write

    def _sum_tokens(self, rows: Sequence[Row]) -> None:
        """The newest tokens of the decode batch, all at once: drawing then finds their pages' sums."""
        places = [
            (row.pages[row.start // self._block], *divmod(row.start, self._block)) for row in rows if row.count == 1
        ]
        known = {page: self._sums.get(page, (index, 0, 0)) for page, index, _ in places}
        new = [(page, index, slot) for page, index, slot in places if known[page][:2] == (index, slot)]
        if not new:
            return
        pages, slots = [page for page, _, _ in new], [slot for _, _, slot in new]
        positions = np.array([index * self._block + slot for _, index, slot in new], np.uint64)
        words = self._memory[:, pages, :, slots].transpose(1, 2, 0, 3)
        for (page, index, slot), weight in zip(new, _weigh(words, positions, self._layers.start).tolist(), strict=True):
            self._sums[page] = (index, slot + 1, (known[page][2] + weight) & MASK)

    def _sum(self, row: Row, total: int) -> int:
        """Over all bytes here of the row's KV, on top of `total` of the layers before."""
        end = row.start + row.count
        pages = row.pages[: -(-end // self._block)]
        return (total + sum(self._page_sum(page, index, end) for index, page in enumerate(pages))) & MASK

    def _draw(self, row: Row, sampling: Sampling, before: int = 0) -> Draw:
        """`before`: the sum of the layers before those here."""
        end = row.start + row.count
        token = mix(self._sum(row, before)) % self.config.vocabulary
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos and self.config.end_token is not None:
            ends.add(self.config.end_token)
        if end - row.prompt_tokens < sampling.min_tokens:
            while token in ends:
                token = (token + 1) % self.config.vocabulary
        if sampling.logprobs is None:
            return Draw(token, is_end=token in ends)
        return Draw(token, 0.0, [(token, 0.0)][: sampling.logprobs], token in ends)

    def _page_sum(self, page: int, index: int, end: int) -> int:
        """Over the bytes of the page's tokens below `end`; only new ones are read if the rest is known."""
        used = min(end - index * self._block, self._block)
        known_index, known, total = self._sums.get(page, (index, 0, 0))
        if known_index != index or known > used:
            known = total = 0
        if known < used:
            words = self._memory[:, page, :, known:used]
            positions = np.arange(known, used, dtype=np.uint64) + np.uint64(index * self._block)
            weights = _weigh(words, positions, self._layers.start)
            total = (total + int(weights.sum(dtype=np.uint64))) & MASK
            self._sums[page] = (index, used, total)
        return total


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.monotonic()))


def mix(value: int) -> int:
    """splitmix64's finalizer."""
    value = ((value ^ (value >> 30)) * MIX[0]) & MASK
    value = ((value ^ (value >> 27)) * MIX[1]) & MASK
    return value ^ (value >> 31)


def _mix(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX[0])
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX[1])
    return values ^ (values >> np.uint64(31))


def _kv(layer: int, states: Words, width: int) -> Words:
    """[2, count, width]: the words of K and V of one layer at the positions of these states."""
    places = np.arange(layer * 2 * width, (layer + 1) * 2 * width, dtype=np.uint64).reshape(2, 1, width)
    words = _mix(states[None, :, None] + (places + np.uint64(1)) * np.uint64(ODD))
    if layer == 0:
        words[0, :, 0] = states
    return words


def _weigh(words: Words, positions: Words, layer: int) -> Words:
    """[token] sums over [layer, half, token, word], an odd weight for each place: any one changed word shows.

    `positions`: of the tokens; `layer`: the first one.
    """
    layers, halves, tokens, width = words.shape
    first = layer * halves * width
    places = np.arange(first, first + layers * halves * width, dtype=np.uint64).reshape(layers, halves, 1, width)
    weights = _mix(positions.reshape(1, 1, tokens, 1) * np.uint64(1 << 20) + places) | np.uint64(1)
    summed: Words = (words * weights).sum(axis=(0, 1, 3), dtype=np.uint64)
    return summed


def _space(config: TimedConfig, block_tokens: int) -> KeySpace:
    name = hashlib.sha256(f"timed {config.layers} {config.words_per_half} {config.vocabulary}".encode()).hexdigest()
    return KeySpace(
        id=key_space_id(
            model_fingerprint=name,
            dtype="uint64",
            block_tokens=block_tokens,
            layers=config.layers,
            kv_heads=1,
            head_dim=config.words_per_half,
        ),
        block_tokens=block_tokens,
        runs=config.layers,
        run_bytes=2 * block_tokens * config.words_per_half * WORD,
    )


def reference_tokens(prompt: Sequence[int], count: int, config: TimedConfig | None = None) -> list[int]:
    """The `count` tokens that follow `prompt` where no end token is set. Plain integers: no pages, no engine.

    A live stream of a request without `stop_token_ids` must be exactly this, whatever moved where.
    """
    config = config or TimedConfig()
    width = config.words_per_half
    tokens, state, total, done = list(prompt), 0, 0, 0
    while len(tokens) < len(prompt) + count:
        for position in range(done, len(tokens)):
            state = mix((state + (tokens[position] + 1) * ODD) & MASK)
            for place in range(config.layers * 2 * width):
                word = state if place == 0 else mix((state + (place + 1) * ODD) & MASK)
                total += word * (mix((position << 20) + place) | 1)
        done = len(tokens)
        tokens.append(mix(total & MASK) % config.vocabulary)
    return tokens[len(prompt) :]
