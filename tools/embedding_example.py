"""A small model that lives outside the engine and drives it: docs/embedding.md walks through it.

    python -m ringslab.tools.embedding_example --config quickstart.yaml --arrays numpy

The model is random and useless, but whole: token embeddings, a query and a key projection a layer,
attention by the engine, an output projection, greedy tokens, and drafts that are guessed from what
was generated before. It works on NumPy or CuPy arrays; `xp` is the one module or the other.
"""

import argparse
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from ..engine.engine import Engine
from ..layouts.config import Config, load_config
from ..rawkernels.apply_rope import apply_rope
from ..schedules.batch import Batch, Request


@dataclass(frozen=True)
class Model:
    """Weights of a toy model, float32 arrays of the module `xp`."""

    xp: Any
    cfg: Config
    embedding: Any  # [vocab, width]
    wq: list  # of each layer, [width, num_q_heads * head_dim]
    wkv: list  # [width, head_dim]
    wo: list  # [num_q_heads * head_dim, width]


def make_model(cfg: Config, xp: Any, *, vocab: int = 64, width: int = 32, seed: int = 0) -> Model:
    """Random weights; the same numbers for NumPy and CuPy."""
    rng = np.random.default_rng(seed)
    heads = cfg.num_q_heads * cfg.head_dim

    def weight(rows: int, columns: int) -> Any:
        return xp.asarray(rng.standard_normal((rows, columns), np.float32) / rows**0.5)

    layers = range(len(cfg.layers))
    return Model(
        xp,
        cfg,
        embedding=weight(vocab, width),
        wq=[weight(width, heads) for _ in layers],
        wkv=[weight(width, cfg.head_dim) for _ in layers],
        wo=[weight(heads, width) for _ in layers],
    )


def forward(model: Model, engine: Engine, batch: Batch) -> np.ndarray:
    """Runs a batch through every layer; returns the best next token of each position, int [T]."""
    xp, cfg = model.xp, model.cfg
    hidden = model.embedding[xp.asarray(batch.token_ids)]  # [T, width]
    positions = xp.asarray(batch.positions)
    for layer in cfg.layers:
        # The engine takes queries rotated and keys not: it rotates keys as it stores them.
        q = (hidden @ model.wq[layer.id]).reshape(-1, cfg.num_q_heads, cfg.head_dim)
        q = apply_rope(to_bf16(q), positions, layer.rope)
        kv = to_bf16(hidden @ model.wkv[layer.id])
        out = engine.attend(layer.id, batch, q, kv)
        if layer.role == "draft":
            continue  # a real draft head would read this; ours only keeps its rings filled
        mixed = from_bf16(xp, out).reshape(batch.num_tokens, -1) @ model.wo[layer.id]
        hidden = hidden + mixed
        hidden = hidden / xp.sqrt(xp.mean(hidden * hidden, axis=1, keepdims=True) + 1e-6)
    best = xp.argmax(hidden @ model.embedding.T, axis=1)
    return best if isinstance(best, np.ndarray) else best.get()


def commit_greedy(engine: Engine, batch: Batch, best: np.ndarray, *, use_drafts: bool) -> int:
    """Keeps the drafts that the model would have said itself, and commits; returns how many."""
    num_drafts = batch.num_drafts
    accepted = np.zeros(batch.num_seqs, np.int32)
    next_tokens = np.zeros(batch.num_seqs, np.int32)
    drafts = np.full((batch.num_seqs, engine.cfg.tokens_per_step - 1), -1, np.int32)
    for i, request_id in enumerate(batch.request_ids):
        begin, end = batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1]
        # A decode's tokens are the last known one and its drafts; best[t] is what follows token t.
        while (
            accepted[i] < num_drafts[i]
            and batch.token_ids[begin + 1 + accepted[i]] == best[begin + accepted[i]]
        ):
            accepted[i] += 1
        last = begin + accepted[i] if batch.kind == "decode" else end - 1
        next_tokens[i] = best[last]
        if use_drafts and batch.is_last_chunk[i]:
            new = [*best[begin:last].tolist(), next_tokens[i]] if batch.kind == "decode" else []
            known = [*engine.tokens(request_id).tolist(), *(new or [int(next_tokens[i])])]
            guess = guess_drafts(known, drafts.shape[1])
            drafts[i, : len(guess)] = guess
    engine.commit(batch, accepted, next_tokens, drafts)
    return int(accepted.sum())


def guess_drafts(tokens: list[int], count: int) -> list[int]:
    """What followed the last token the time before, up to `count` tokens; nothing if it is new."""
    for at in range(len(tokens) - 2, -1, -1):
        if tokens[at] == tokens[-1]:
            return tokens[at + 1 : at + 1 + count]
    return []


def generate(
    model: Model, engine: Engine, prompts: dict[str, np.ndarray], new_tokens: int, *, drafts: bool
) -> tuple[dict[str, np.ndarray], int]:
    """Greedy continuations of prompts, prompt included, and the number of accepted drafts."""
    for request_id, prompt in prompts.items():
        engine.submit(Request(request_id, prompt, new_tokens))
    kept = 0
    while (batch := engine.next_batch()) is not None:
        best = forward(model, engine, batch)
        kept += commit_greedy(engine, batch, best, use_drafts=drafts)
    return {request_id: engine.tokens(request_id) for request_id in prompts}, kept


def to_bf16(x: Any) -> Any:
    """float32 to bf16 bits (uint16), to nearest even, for NumPy and CuPy alike."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(xp: Any, out: Any) -> Any:
    """float32 array of `xp` from the engine's output: NumPy bfloat16 on the host, uint16 bits on a
    GPU."""
    if xp is np and not isinstance(out, np.ndarray):
        out = out.get()  # an engine on a GPU, a model in NumPy
    return (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="quickstart.yaml")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--arrays", default="numpy", choices=("numpy", "cupy"))
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args(argv)
    cfg = load_config(args.config)
    model = make_model(cfg, import_module(args.arrays))
    rng = np.random.default_rng(1)
    prompts = {f"prompt-{n}": rng.integers(0, 64, n).astype(np.int32) for n in (3, 40, 75)}
    with Engine(cfg, args.backend) as engine:
        tokens, kept = generate(model, engine, prompts, args.new_tokens, drafts=True)
        print(f"backend {engine.backend}, {kept} drafts accepted")
    for request_id, known in tokens.items():
        print(request_id, "...", *known[-args.new_tokens :])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
