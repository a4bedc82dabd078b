"""Times decode attention of one prefix group whose prefix is read once, per member, or copied.

Run: OMP_NUM_THREADS=1 python benchmarks/group_attention.py
Three plans of the same step, 64 members with a prefix of 2,000 and 200 own tokens each (the prefix
in whole blocks):

    group    the prefix as one segment for all members, merged with each member's own tokens
    shared   paged decode of every member over the same blocks of the prefix
    private  paged decode of every member over its own copy of the prefix

One layer, no projections, with the kernel of an engine on this host: compiled, or torch with
--torch. Outputs of the three plans are compared before anything is timed. Rounds are interleaved.
The table shows the median CPU time of the thread; the result file also has the minimum.
"""

import argparse
import statistics
import time
from pathlib import Path

import conditions
import torch

from raybatch.config.environment import kernel_vectors
from raybatch.kernels.attention import TORCH_DECODE, PreparedAttention, attend, prepare_attention
from raybatch.kernels.attention_plan import AttentionPlan, DecodeForm, DecodePart, PrefixSegment
from raybatch.kernels.native.decode_attention import decode_form

NAMES = ("group", "shared", "private")


class Case:
    """Runs the three plans over one pool with all the KV."""

    def __init__(
        self,
        *,
        members: int,
        prefix: int,
        own: int,
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        form: DecodeForm,
    ) -> None:
        torch.manual_seed(0)
        self.form = form
        self.members, self.block_size = members, block_size
        num_prefix, num_own = prefix // block_size, -(-(own + 1) // block_size)
        self.length = num_prefix * block_size + own
        num_blocks = (members + 1) * num_prefix + members * num_own
        shape = (num_blocks, heads[1], block_size, head_dim)
        self.k_pool, self.v_pool = torch.randn(shape), torch.randn(shape)
        self.prefix = torch.arange(num_prefix)
        copies = torch.arange(num_prefix, (members + 1) * num_prefix).view(members, -1)
        for pool in (self.k_pool, self.v_pool):
            pool[copies.flatten()] = pool[self.prefix].repeat(members, 1, 1, 1)
        self.own = torch.arange((members + 1) * num_prefix, num_blocks).view(members, -1)
        self.q = torch.randn(members, heads[0], head_dim)
        self.new = torch.randn(members, heads[1], head_dim)
        shared = self.prefix.expand(members, -1)
        self.prepared = {
            "group": self._prepare(self.own, has_segment=True),
            "shared": self._prepare(torch.cat((shared, self.own), dim=1)),
            "private": self._prepare(torch.cat((copies, self.own), dim=1)),
        }

    def _prepare(self, tables: torch.Tensor, *, has_segment: bool = False) -> PreparedAttention:
        blocks, owners = tables.flatten(), torch.arange(self.members)
        owners = owners.repeat_interleave(tables.shape[1])
        skipped = len(self.prefix) if has_segment else 0
        first = (torch.arange(tables.shape[1]) + skipped).repeat(self.members) * self.block_size
        order = blocks.argsort(stable=True)
        decode = DecodePart(
            block_ids=blocks[order],
            owners=owners[order],
            num_valid=(self.length + 1 - first).clamp(max=self.block_size)[order],
            is_contiguous=bool((blocks[order].diff() == 1).all()),
            first_positions=first[order],
        )
        segment = PrefixSegment(
            query_idx=torch.arange(self.members),
            block_ids=self.prefix,
            num_tokens=skipped * self.block_size,
        )
        plan = AttentionPlan(
            num_decode=self.members,
            decode=decode,
            prefill=None,
            segments=(segment,) if has_segment else (),
        )
        last = self.own[:, -1] * self.block_size + self.length % self.block_size
        return prepare_attention(
            plan,
            positions=torch.full((self.members,), self.length),
            slot_mapping=last,
            pool=self.k_pool,
            windows=(None,),
            decode=self.form,
        )

    def attend(self, name: str) -> torch.Tensor:
        """Run one layer's attention of the named plan."""
        pools = (self.k_pool, self.v_pool)
        return attend(self.q, self.new, self.new, *pools, self.prepared[name], None)

    def check(self) -> None:
        """Raise AssertionError unless the three plans agree."""
        expected = self.attend("private")
        for name in NAMES:
            torch.testing.assert_close(self.attend(name), expected, rtol=1e-5, atol=1e-5)


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds of each plan, round by round."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in NAMES:
            began = time.thread_time()
            case.attend(name)
            times[name].append((time.thread_time() - began) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=2000)
    parser.add_argument("--own", type=int, default=200)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--torch", action="store_true", help="use torch, not compiled kernels")
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print(f"{options.members} members, prefix {options.prefix}, own {options.own} tokens")
    print("query heads, KV heads, head dim: " + ", ".join(f"{name} ms" for name in NAMES))
    for heads, head_dim in (((8, 2), 64), ((16, 2), 64), ((8, 2), 128), ((8, 8), 64)):
        form = None
        if not options.torch:
            form = decode_form(
                head_dim=head_dim,
                num_grouped=heads[0] // heads[1],
                block_size=options.block_size,
                kv_dtype=torch.float32,
            )
        case = Case(
            members=options.members,
            prefix=options.prefix,
            own=options.own,
            heads=heads,
            head_dim=head_dim,
            block_size=options.block_size,
            form=form or TORCH_DECODE,
        )
        case.check()
        times = measure(case, options.rounds)
        least = {name: round(min(values), 3) for name, values in times.items()}
        median = {name: round(statistics.median(values), 3) for name, values in times.items()}
        shape = {"query_heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim}
        results.append({**shape, "least_ms": least, "median_ms": median})
        cells = " ".join(f"{median[name]:8.2f}" for name in NAMES)
        print(
            f"{heads[0]:3} {heads[1]:3} {head_dim:4}: {cells}   private / group "
            f"{median['private'] / median['group']:.2f}, shared / group "
            f"{median['shared'] / median['group']:.2f}"
        )
    conditions.write_result(
        options.out,
        "group_attention.py",
        vectors="torch" if options.torch else kernel_vectors() or "native",
        results=results,
    )


if __name__ == "__main__":
    main()
