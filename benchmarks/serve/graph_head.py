"""The likeliest tokens by a search in a graph over the vocabulary (FGD), against the exact product.

`python benchmarks/serve/graph_head.py [--vocabulary 131072] [--width 512] [--write]`: tables whose rows lie near few
directions, as those of trained heads do, with rows of several lengths, and states that lie between rows of the tokens
that they predict; at last a table of independent numbers, in which nothing is near anything. CPU-seconds, one thread,
interleaved: a row of the product, then a row of the search. Recall: of the product's likeliest ten. Needs faiss-cpu.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from gnomon.serve.graph_head import BUILD_EF, NEIGHBOURS, RECALLED, WIDTHS, GraphHead

RESULT = Path(__file__).parents[1] / "results" / "serve_graph_head.md"
STATES = 200


def tables(vocabulary: int, width: int) -> Iterator[tuple[str, torch.Tensor]]:
    rng = np.random.default_rng(0)
    for directions, noise in ((64, 0.1), (128, 0.2), (0, 1.0)):
        if directions:
            basis = np.linalg.qr(rng.standard_normal((width, width)))[0][:directions]
            rows = rng.standard_normal((vocabulary, directions)) * np.arange(1, directions + 1) ** -0.5 @ basis
            rows += noise * np.linalg.norm(rows, axis=1).mean() / width**0.5 * rng.standard_normal(rows.shape)
        else:
            rows = rng.standard_normal((vocabulary, width))
        rows *= (1 + 0.15 * rng.standard_normal((vocabulary, 1))) / np.linalg.norm(rows, axis=1).mean()
        name = f"{directions} directions, {noise:.0%} beside them" if directions else "independent numbers"
        yield name, torch.from_numpy(rows.astype(np.float32))


def states_of(table: torch.Tensor) -> torch.Tensor:
    """Of tokens that are weighed against each other, and a part that says nothing of them."""
    generator = torch.Generator().manual_seed(1)
    at = torch.randint(len(table), (STATES, 5), generator=generator)
    weight = torch.rand((STATES, 3, 1), generator=generator)
    states = (table[at[:, :3]] * weight).sum(1)
    aside = table[at[:, 3]] - table[at[:, 4]]
    states += 0.3 * states.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(aside, dim=1)
    return 20 * states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name, table in tables(given.vocabulary, given.width):
        begin = time.process_time()
        head, states = GraphHead(table, None), states_of(table)
        built = time.process_time() - begin
        wanted = head.exact(states).topk(RECALLED).indices.numpy()
        for width in WIDTHS[2:]:
            exact_s, graph_s, hits, first = [], [], 0, 0
            for state, ids in zip(states, wanted, strict=True):
                begin = time.process_time()
                head.exact(state[None])
                middle = time.process_time()
                tokens, logits = head.likeliest(state, 2 * RECALLED, width)
                best = tokens[logits.topk(RECALLED).indices.numpy()]
                end = time.process_time()
                exact_s.append(middle - begin)
                graph_s.append(end - middle)
                hits += len(set(best.tolist()) & set(ids.tolist()))
                first += best[0] == ids[0]
            exact, graph = np.median(exact_s), np.median(graph_s)
            recall = hits / STATES / RECALLED
            lines.append(
                f"| {name} | {built:.0f} | {width} | {recall:.4f} | {first / STATES:.3f} | {graph * 1e3:.2f} | "
                f"{exact * 1e3:.2f} | {exact / graph:.1f} |"
            )
            print(lines[-1], flush=True)
            if recall >= 0.995 or graph > exact:
                break
    if given.write:
        how = (
            f"`python benchmarks/serve/graph_head.py --write`, {time.strftime('%Y-%m-%d')}, one thread of a machine "
            f"that others used too ({platform.machine()}), torch {torch.__version__}, {given.vocabulary:,} tokens of "
            f"{given.width} numbers in float32, faiss HNSW with {NEIGHBOURS} neighbours, built {BUILD_EF} wide. "
            f"Medians of {STATES} states, interleaved; tables and states are made up as the program's head says."
        )
        columns = "rows lie near|build CPU-s|width|recall@10|likeliest found|search ms|product ms|times faster"
        head_line = f"| {' | '.join(columns.split('|'))} |\n|---|{'---:|' * 7}"
        title = "# A head's likeliest tokens by a search in a graph (FGD)"
        RESULT.write_text("\n\n".join((title, how, "\n".join((head_line, *lines)))) + "\n")


if __name__ == "__main__":
    main()
