"""Helpers of the engine tests: the smallest configuration, activations of a caller, and a loop."""

from pathlib import Path

import numpy as np

import ringslab as rs
from ringslab.rawkernels.operations import load_operations

TINY = Path(__file__).with_name("tiny.yaml")
SEED = 11


def tiny(*overrides):
    return rs.load_config(TINY, overrides=overrides)


def activations(cfg, layer, token_ids, positions):
    """q uint16 [T, H, D] and kv uint16 [T, D]: a pure function of layer, token and position."""
    reference = load_operations("reference")
    q = np.empty((len(token_ids), cfg.num_q_heads * cfg.head_dim), np.uint16)
    kv = np.empty((len(token_ids), cfg.head_dim), np.uint16)
    reference.seeded_activations(2 * SEED + 1, layer, token_ids, positions, q)
    reference.seeded_activations(2 * SEED, layer, token_ids, positions, kv)
    return q.reshape(-1, cfg.num_q_heads, cfg.head_dim), kv


def host(x):
    """A host copy, bf16 as uint16 bits."""
    x = x if isinstance(x, np.ndarray) else x.get()
    return x.view(np.uint16).copy()


def attend_all(engine, batch, layers=None):
    """Outputs of every layer of a batch, uint16 [layers, T, H, D]."""
    layers = range(len(engine.cfg.layers)) if layers is None else layers
    outputs = []
    for layer in layers:
        q, kv = activations(engine.cfg, layer, batch.token_ids, batch.positions)
        outputs.append(host(engine.attend(layer, batch, q, kv)))
    return np.stack(outputs)


class Story:
    """A model whose next token is a function of request and position, and the outputs it saw."""

    def __init__(self, vocab_size=1000):
        self.vocab_size = vocab_size
        self.outputs = {}  # (request, layer, position): uint16 [H, D] of the last accepted token

    def token(self, request_id, position):
        return (sum(request_id.encode()) * 7919 + position * 104729) % self.vocab_size

    def prompt(self, request_id, length):
        return np.array([self.token(request_id, p) for p in range(length)], np.int32)

    def step(self, engine, batch, *, drafts=0, right=0):
        """Runs and commits a batch; each next step has `drafts` drafts, the first `right` of them
        right."""
        outputs = attend_all(engine, batch)
        starts = batch.seqlens_k - batch.seqlens_q
        accepted, next_tokens, rows = [], [], []
        for i, request_id in enumerate(batch.request_ids):
            begin, end = batch.cu_seqlens_q[i : i + 2]
            kept = 0
            if batch.kind == "decode":
                while kept < batch.num_drafts[i] and batch.token_ids[
                    begin + 1 + kept
                ] == self.token(request_id, int(starts[i]) + 1 + kept):
                    kept += 1
                end = begin + 1 + kept
            for token in range(begin, end):
                for layer in range(engine.cfg.num_layers):
                    key = (request_id, layer, int(batch.positions[token]))
                    self.outputs[key] = outputs[layer, token]
            after = int(starts[i]) + (end - begin)
            accepted.append(kept)
            next_tokens.append(self.token(request_id, after))
            rows.append(
                [
                    (self.token(request_id, after + 1 + j) + (j >= right)) % self.vocab_size
                    for j in range(drafts)
                ]
            )
        table = np.array(rows, np.int32).reshape(len(rows), drafts)
        engine.commit(batch, np.array(accepted), np.array(next_tokens, np.int32), table)

    def run(self, engine, *, drafts=0, right=0, after_step=None):
        while (batch := engine.next_batch()) is not None:
            self.step(engine, batch, drafts=drafts, right=right)
            if after_step is not None:
                after_step(batch)
        return self.outputs


def same_outputs(found, wanted):
    """AssertionError unless both hold the same tokens with the same bits."""
    assert found.keys() == wanted.keys()
    for key, rows in wanted.items():
        assert np.array_equal(found[key], rows), key


def preempt_every_third():
    """An `on_step` for `Engine.run` that preempts the last request of every third batch."""
    steps = []

    def preempt(engine, batch):
        steps.append(batch)
        victim = batch.request_ids[-1]
        if len(steps) % 3 == 0 and engine.scheduler.state(victim) in ("prefill", "decode"):
            engine.preempt(victim)

    return preempt
