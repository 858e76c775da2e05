"""Runs of an engine with stacked layers, whose next token follows from the last one, so that
equal prefixes stay equal; and what such a run must give, computed without cache, drafts or batches.
"""

from functools import cache

import numpy as np
from engine_runs import host, tiny

import ringslab as rs
from ringslab.engine.activations import open_source, seeded_sinks
from ringslab.engine.samples import Sample
from ringslab.engine.verify import Judge
from ringslab.rawkernels.operations import load_operations

VOCAB = 1000
STACKED = ("run.activations=stacked",)


def next_token(last, position):
    return int(last * 7919 + position * 104729 + 13) % VOCAB


def continued(tokens, count):
    """The tokens, and `count` more."""
    tokens = [int(token) for token in tokens]
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens)))
    return np.array(tokens, np.int32)


def block(name, size=8):
    """Tokens of a named block: prompts that start with the same blocks share a prefix."""
    return (np.arange(size) * 31 + name * 577 + 5) % VOCAB


def prompt_of(*names, tail=0):
    """Named blocks one after another, then `tail` tokens."""
    return np.concatenate([*map(block, names), block(99)[:tail]]).astype(np.int32)


class Run:
    """Outputs of every accepted token that the engine computed for its own sake."""

    def __init__(self, engine):
        self.engine = engine
        self.source = open_source(
            engine.cfg, engine.tools.ops, engine.memory, engine.sizes.max_tokens
        )
        self.outputs = {}  # (request, layer, position): uint16 [H, D]
        self.computed = {}  # request: positions, in the order in which they were computed
        self.starts = {}  # (request, position): where computing began in the slot of that output
        self.known = {}
        self.first_outputs = {}  # request: (start, first output) of its last admission

    def submit(self, id, prompt, new):
        self.engine.submit(rs.Request(id, prompt, new))
        self.known[id] = continued(prompt, new)

    def step(self, drafts=lambda id, room: (0, 0)):
        """One batch. `drafts(id, room)` gives how many drafts the next step has, and how many of
        them are right."""
        engine = self.engine
        batch = engine.next_batch()
        if batch is None:
            return None
        outputs = self._attend(batch)
        width = engine.cfg.tokens_per_step - 1
        accepted, following, proposed = [], [], []
        for i, id in enumerate(batch.request_ids):
            first, begin = int(batch.seqlens_k[i] - batch.seqlens_q[i]), batch.cu_seqlens_q[i]
            tokens, truth = batch.token_ids[begin : batch.cu_seqlens_q[i + 1]], self.known[id]
            kept = 0
            while kept < batch.num_drafts[i] and tokens[1 + kept] == truth[first + 1 + kept]:
                kept += 1
            count = 1 + kept if batch.kind == "decode" else len(tokens)
            if batch.is_first_chunk[i]:
                self.first_outputs[id] = int(batch.start_positions[i]), int(batch.first_outputs[i])
            for j in range(count):
                self.computed.setdefault(id, []).append(first + j)
                if first + j >= batch.first_outputs[i]:
                    self.starts[id, first + j] = int(batch.start_positions[i])
                    for layer in range(engine.cfg.num_layers):
                        self.outputs[id, layer, first + j] = outputs[layer][begin + j]
            end = first + count
            wanted, right = drafts(id, max(len(truth) - end - 1, 0))
            row = np.full(width, -1, np.int32)
            row[:wanted] = truth[end + 1 : end + 1 + wanted]
            row[right:wanted] = (row[right:wanted] + 1) % VOCAB
            accepted.append(kept)
            following.append(truth[end] if end < len(truth) else 0)
            proposed.append(row)
        engine.commit(batch, accepted, np.array(following, np.int32), np.array(proposed))
        return batch

    def run(self, **how):
        while self.step(**how) is not None:
            pass
        return self

    def _attend(self, batch):
        engine, size = self.engine, batch.num_tokens
        buffers, found = engine.run_buffers(), []
        with engine.memory.scope():
            self.source.prepare(batch)
            q, kv, out = buffers.first(size)
            for layer in range(len(engine.cfg.layers)):
                self.source.fill(layer, batch, q, kv, out)
                engine.attend(layer, batch, q, kv, out)
                found.append(host(out))
        return found


@cache
def expected(tokens):
    """Of each layer, the exact outputs float64 [n, H, D] of a sequence from layer 0 up, and their
    bound, which grows through the layers as rounding does."""
    cfg = tiny(*STACKED)
    reference = load_operations("reference")
    source = open_source(cfg, reference, None, 0)
    judge = Judge(
        cfg, reference, source, seeded_sinks(cfg), lambda id, n: np.array(tokens[:n], np.int32)
    )
    layers, count = range(cfg.num_layers), len(tokens)
    results = judge.from_layer_0([Sample("a", layer, p) for layer in layers for p in range(count)])
    return [
        (np.stack([results[layer * count + p][0] for p in range(count)]), results[layer * count][1])
        for layer in layers
    ]


def errors(run, id):
    """{(layer, position): error / bound} of the outputs that a run gave for a request."""
    import ml_dtypes

    wanted = expected(tuple(run.known[id].tolist()))
    found = {}
    for (name, layer, position), rows in run.outputs.items():
        if name == id:
            exact, bound = wanted[layer]
            value = rows.view(ml_dtypes.bfloat16).astype(np.float64)
            found[layer, position] = np.abs(value - exact[position]).max() / bound
    return found


def cached(contract, *overrides, backend="cpu"):
    """An engine of the tiny model with a prefix cache."""
    return rs.Engine(tiny(*STACKED, f"prefix.contract={contract}", *overrides), backend)


@cache
def tiny_alone(tokens):
    """Outputs uint16 [H, D] by (layer, position) of a sequence alone in an engine of one slot,
    without cache, drafts or chunks."""
    with rs.Engine(tiny(*STACKED, "engine.token_budget=512"), "cpu", num_state_slots=1) as engine:
        run = Run(engine)
        run.submit("a", np.array(tokens, np.int32), 0)
        run.run()
    return {(layer, position): rows for (_, layer, position), rows in run.outputs.items()}


def check_alone(run, *ids):
    """All outputs of a run on the CPU, or those of some requests, have the bits of requests
    alone."""
    chosen = {key: rows for key, rows in run.outputs.items() if not ids or key[0] in ids}
    assert {id for id, _, _ in chosen} >= set(ids)
    assert chosen
    for (id, layer, position), rows in chosen.items():
        wanted = tiny_alone(tuple(run.known[id].tolist()))
        np.testing.assert_array_equal(rows, wanted[layer, position])
