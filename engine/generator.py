"""The embedded generator: continuous batching over any causal language model that transformers can load.

Promise: what a request generates does not depend on what else is in the batch (up to the last bits of the logits, see
``engine/sampling.py``), each token is tagged with the weights that made it, and ``generated_tokens`` counts every token
at the moment it is drawn, past every buffer, queue and journal.

One decode step gives each running sequence one token. Requests join and leave between steps; so do new weights:
running sequences go on with the keys and values that the old weights left in the cache, as vLLM's ``keep`` mode does.

``deterministic`` decodes one sequence at a time, always with the same shapes: the prompt in one call, then token by
token. A reused prefix is fed token by token as well, so that a resumed response has the bits of an uninterrupted one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..journal.errors import UnlostError
from . import kv_cache, models, sampling

log = logging.getLogger(__name__)

REASON_EOS: Final = "eos"
REASON_LENGTH: Final = "length"
REASON_ABORTED: Final = "aborted"
REASON_FAILED: Final = "failed"

OnDelta = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32], int, int], None]
"""(token ids, log-probabilities, branch, version) of newly generated tokens, in order, reused prefix not included."""

OnDone = Callable[[str], None]
"""``eos``, ``length``, ``aborted``, or ``failed: <cause>``. Called once, after the last delta."""


class GeneratorError(UnlostError):
    """A request that can't be generated, or a generator that has failed or was stopped; the message says which."""


@dataclass(eq=False, slots=True)
class _Sequence:
    request_id: Hashable
    prompt: list[int]
    replay: deque[int]
    """Tokens of a reused prefix that are still to be fed one by one (``deterministic`` only)."""
    seed: int
    max_new_tokens: int
    temperature: float
    top_p: float
    on_delta: OnDelta
    on_done: OnDone
    generated: int
    """Tokens of the response so far, reused prefix included: the index of the next draw."""
    last: int
    """The newest token, not yet in the cache."""
    length: int = 0
    """Tokens in the cache."""
    ended: str = ""
    aborted: bool = False


@dataclass(slots=True)
class _Batch:
    """Sequences and, row by row, their cache."""

    sequences: list[_Sequence] = field(default_factory=list)
    cache: Any = None

    def rows(self) -> list[int]:
        """Rows of the sequences that go on."""
        return [row for row, sequence in enumerate(self.sequences) if not sequence.ended]

    def part(self) -> tuple[Any, list[int], int]:
        """What ``kv_cache.merge`` takes over from here."""
        rows = self.rows()
        return self.cache, rows, max((self.sequences[row].length for row in rows), default=0)


class EmbeddedGenerator:
    """Generates on one device. ``start`` runs the decode loop in a thread; ``step`` runs it by hand (not both).

    ``max_batch``: sequences decoded together. ``max_prefill_tokens``: padded size of one call that brings in new
    sequences (at least one is always taken). ``eos``: ids that end a response, by default those that the model's
    settings and ``tokenizer`` (if given) name. ``dtype``: float32, bfloat16, float16, or auto (as stored).

    Raises ModelFolderError if the model can't be loaded, GeneratorError if it can't be generated from here.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        max_batch: int = 32,
        device: str = "auto",
        dtype: str = "float32",
        deterministic: bool = False,
        threads: int = 0,
        eos: Collection[int] | None = None,
        tokenizer: Any = None,
        max_prefill_tokens: int = 16384,
        branch: int = 0,
        version: int = 0,
    ) -> None:
        self._deterministic = deterministic
        self._threads = threads or (1 if deterministic else 0)
        self._set_threads()
        self.device = models.resolve_device(device)
        self.model = models.load_model(model_path, device=self.device, dtype=models.resolve_dtype(dtype, model_path))
        self._refuse_unsupported()
        self.eos = frozenset(eos) if eos is not None else models.eos_token_ids(self.model, tokenizer)
        self.max_batch = 1 if deterministic else max_batch
        self._max_prefill_tokens = max_prefill_tokens
        self._context = getattr(self.model.config, "max_position_embeddings", None)
        self._forward = kv_cache.Forward(self.model)
        self._batch = _Batch()
        self._waiting: deque[_Sequence] = deque()
        self._known: dict[Hashable, _Sequence] = {}
        self._weights = (branch, version)
        self._changed = threading.Condition()
        """Guards ``_waiting``, ``_known``, ``_swaps_waiting``, ``_stopping``; notified when any of them changes."""
        self._swaps_waiting = 0
        self._stopping = False
        self._model_lock = threading.Lock()
        """Held during a step and while weights are replaced; taken before ``_changed``, never after."""
        self._thread: threading.Thread | None = None
        self.generated_tokens = 0
        self.failure = ""

    def _refuse_unsupported(self) -> None:
        config = self.model.config
        kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds or getattr(self.model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
            raise GeneratorError(
                f"{type(self.model).__name__} keeps other state than keys and values "
                f"({', '.join(sorted(kinds)) or 'recurrent'}); the embedded generator runs attention-only decoders"
            )

    # --- requests ---------------------------------------------------------------------------------------------

    def submit(
        self,
        request_id: Hashable,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        prefix_ids: Sequence[int] = (),
        on_delta: OnDelta,
        on_done: OnDone,
    ) -> None:
        """Queue a request. ``max_new_tokens`` counts the reused ``prefix_ids`` too; callbacks run on the decode thread.

        A prefix that is already complete (it ends with an end token, or fills ``max_new_tokens``) is done without a
        token. Raises GeneratorError for a request that can't work, before anything is queued.
        """
        prompt, prefix = [int(token) for token in prompt_ids], [int(token) for token in prefix_ids]
        self._check_request(prompt, prefix, max_new_tokens, temperature, top_p)
        replayed = prefix if self._deterministic else []
        fed = prompt + ([] if self._deterministic else prefix)
        sequence = _Sequence(
            request_id=request_id, prompt=fed, replay=deque(replayed), seed=seed, max_new_tokens=max_new_tokens,
            temperature=temperature, top_p=top_p, on_delta=on_delta, on_done=on_done, generated=len(prefix),
            last=fed[-1],
        )  # fmt: skip
        with self._changed:
            if self.failure or self._stopping:
                raise GeneratorError(f"the generator takes no requests: {self.failure or 'it was stopped'}")
            if request_id in self._known:
                raise GeneratorError(f"request {request_id!r} is already running")
            self._known[request_id] = sequence
            self._waiting.append(sequence)
            self._changed.notify_all()

    def _check_request(
        self, prompt: list[int], prefix: list[int], max_new_tokens: int, temperature: float, top_p: float
    ) -> None:
        vocabulary = self.model.config.vocab_size
        if not prompt:
            raise GeneratorError("the prompt has no tokens; an empty prompt needs at least a start token")
        wrong = next((token for token in (*prompt, *prefix) if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise GeneratorError(f"token id {wrong} is outside the model's vocabulary of {vocabulary}")
        if max_new_tokens < 1 or temperature < 0 or not 0 < top_p <= 1 or len(prefix) > max_new_tokens:
            raise GeneratorError(
                f"max_new_tokens {max_new_tokens} (with {len(prefix)} reused), temperature {temperature}, "
                f"top_p {top_p}: must be at least 1 and not less than the prefix, not negative, and in (0, 1]"
            )
        if self._context is not None and len(prompt) + max_new_tokens > self._context:
            raise GeneratorError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones exceed the model's context of "
                f"{self._context}; shorten the prompt or lower generation.max_new_tokens"
            )

    def abort(self, request_ids: Iterable[Hashable]) -> None:
        """End these requests before their next token; unknown ids are ignored. ``on_done("aborted")`` follows."""
        with self._changed:
            for request_id in request_ids:
                if sequence := self._known.get(request_id):
                    sequence.aborted = True
            self._changed.notify_all()

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._batch.sequences)

    @property
    def waiting(self) -> int:
        """Requests that are not in the batch yet."""
        return len(self._waiting)

    @property
    def weights(self) -> tuple[int, int]:
        """(branch, version) of the weights that make the next token."""
        return self._weights

    def load_weights(self, path: str | Path, branch: int, version: int) -> float:
        """Replace the weights between two decode steps. Returns how long decoding stood still, in seconds.

        The folder is read before that. Raises PublishError if it doesn't fit the model; the old weights stay then.
        """
        parameters = models.named_tensors(self.model)
        loaded = models.read_weights(path, self.model)
        # Read, converted and paged in here, so that only a copy between memories is left for the pause.
        ready = {name: tensor.to(parameters[name].dtype, copy=True) for name, tensor in loaded.items()}
        with self._changed:
            self._swaps_waiting += 1
        started = time.perf_counter()
        try:
            with self._model_lock:
                # A step that was running when we came did not stand still.
                started = time.perf_counter()
                with torch.no_grad():
                    for name, tensor in ready.items():
                        parameters[name].copy_(tensor)
                if self.device.startswith("cuda"):
                    torch.cuda.synchronize(self.device)
                self._weights = (branch, version)
        finally:
            with self._changed:
                self._swaps_waiting -= 1
                self._changed.notify_all()
        return time.perf_counter() - started

    # --- the decode loop --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the decode loop in a thread of its own until ``stop``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="unlost-generator", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the loop; whatever has not finished is done as ``aborted``."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._model_lock:
            self._end_all(REASON_ABORTED)

    def _loop(self) -> None:
        self._set_threads()
        while True:
            with self._changed:
                while not self._known and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
            try:
                self.step()
            except Exception:
                log.exception("the generator failed; its requests are given back as failed")
                return

    def _set_threads(self) -> None:
        if self._deterministic:
            models.make_deterministic(self._threads)
        elif self._threads:
            torch.set_num_threads(self._threads)

    def step(self) -> int:
        """One decode step. Returns the number of tokens drawn; 0 when there is nothing to do.

        An error of the model ends every request as ``failed`` and is raised; the generator takes no more requests.
        """
        with self._changed:
            while self._swaps_waiting:  # else a loop that takes the lock again at once would starve the new weights
                self._changed.wait()
        with self._model_lock:
            try:
                with torch.inference_mode():
                    return self._step()
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                self._end_all(f"{REASON_FAILED}: {self.failure}")
                raise

    def _step(self) -> int:
        before = self.generated_tokens
        batch = self._batch
        self._end_aborted()
        if batch.rows():
            self._decode(batch)
        newcomers = self._admit(self.max_batch - len(batch.rows()))
        if newcomers.sequences:
            self._prefill(newcomers)
        if newcomers.rows() or len(batch.rows()) < len(batch.sequences):
            self._batch = _combined(batch, newcomers)
        return self.generated_tokens - before

    def _end_aborted(self) -> None:
        with self._changed:
            aborted = [sequence for sequence in self._known.values() if sequence.aborted and not sequence.ended]
            if aborted:
                self._waiting = deque(sequence for sequence in self._waiting if not sequence.aborted)
        for sequence in aborted:
            self._end(sequence, REASON_ABORTED)

    def _admit(self, places: int) -> _Batch:
        """Take waiting requests into a batch of newcomers, as many as there is room for."""
        taken: list[_Sequence] = []
        finished: list[_Sequence] = []
        with self._changed:
            width = 0
            while self._waiting and len(taken) < places:
                sequence = self._waiting[0]
                if self._reason_to_end(sequence):
                    finished.append(self._waiting.popleft())
                    continue
                width = max(width, len(sequence.prompt))
                if taken and width * (len(taken) + 1) > self._max_prefill_tokens:
                    break
                taken.append(self._waiting.popleft())
        for sequence in finished:
            self._end(sequence, self._reason_to_end(sequence))
        return _Batch(taken)

    def _reason_to_end(self, sequence: _Sequence) -> str:
        newest = sequence.replay[-1] if sequence.replay else sequence.last
        if sequence.generated and newest in self.eos:
            return REASON_EOS
        return REASON_LENGTH if sequence.generated >= sequence.max_new_tokens else ""

    def _prefill(self, newcomers: _Batch) -> None:
        width = max(len(sequence.prompt) for sequence in newcomers.sequences)
        padded = [[0] * (width - len(sequence.prompt)) + sequence.prompt for sequence in newcomers.sequences]
        for sequence in newcomers.sequences:
            sequence.length = len(sequence.prompt)
        newcomers.cache = kv_cache.new_cache()
        self._advance(newcomers, padded)

    def _decode(self, batch: _Batch) -> None:
        for sequence in batch.sequences:
            sequence.length += 1
        self._advance(batch, [[sequence.last] for sequence in batch.sequences])

    def _advance(self, batch: _Batch, fed: list[list[int]]) -> None:
        """Feed tokens to all rows of a batch, and give each sequence that goes on its next token."""
        tokens = torch.tensor(fed, device=self.device)
        lengths = torch.tensor([sequence.length for sequence in batch.sequences], device=self.device)
        logits = self._forward.last_logits(tokens, lengths, batch.cache)
        drawing: list[int] = []
        for row in batch.rows():
            sequence = batch.sequences[row]
            if sequence.replay:
                sequence.last = sequence.replay.popleft()
            else:
                drawing.append(row)
        if not drawing:
            return
        if len(drawing) < len(batch.sequences):
            logits = logits[torch.tensor(drawing, device=self.device)]
        chosen = [batch.sequences[row] for row in drawing]
        token_ids, logprobs = sampling.sample(
            logits.cpu() if self._deterministic else logits,  # CUDA has no deterministic running sum
            [sampling.uniform(sequence.seed, sequence.generated) for sequence in chosen],
            [sequence.temperature for sequence in chosen],
            [sequence.top_p for sequence in chosen],
        )
        self.generated_tokens += len(chosen)
        for sequence, token, logprob in zip(chosen, token_ids, logprobs, strict=True):
            self._accept(sequence, token, logprob)

    def _accept(self, sequence: _Sequence, token: int, logprob: float) -> None:
        if not np.isfinite(logprob):
            branch, version = self._weights
            self._end(sequence, f"{REASON_FAILED}: weights {branch}.{version} give no finite log-probability")
            return
        sequence.last = token
        sequence.generated += 1
        try:
            sequence.on_delta(np.array([token], np.int32), np.array([logprob], np.float32), *self._weights)
        except Exception as error:
            log.exception("request %r: its on_delta raised", sequence.request_id)
            self._end(sequence, f"{REASON_FAILED}: on_delta raised {type(error).__name__}: {error}")
            return
        if reason := self._reason_to_end(sequence):
            self._end(sequence, reason)

    def _end(self, sequence: _Sequence, reason: str) -> None:
        sequence.ended = reason
        with self._changed:
            self._known.pop(sequence.request_id, None)
        try:
            sequence.on_done(reason)
        except Exception:
            log.exception("request %r: its on_done raised", sequence.request_id)

    def _end_all(self, reason: str) -> None:
        with self._changed:
            left = list(self._known.values())
            self._waiting.clear()
        self._batch = _Batch()
        for sequence in left:
            self._end(sequence, reason)


def _combined(batch: _Batch, newcomers: _Batch) -> _Batch:
    """The sequences of both that go on, as one batch."""
    sequences = [part.sequences[row] for part in (batch, newcomers) for row in part.rows()]
    if not sequences:
        return _Batch()
    return _Batch(sequences, kv_cache.merge([batch.part(), newcomers.part()]))
