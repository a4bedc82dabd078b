"""The op of torch behind `varlen_attn`, in plain torch: for a CPU, which has none.

It does what its documentation and its checks of arguments say, for keys that are no pages: sequence
b has the queries from cum_seq_q[b] to cum_seq_q[b + 1] and the first seqused_k[b] keys from
cum_seq_k[b] on, and its last query stands at its last key.
"""

from contextlib import contextmanager

import torch

NAME = "_flash_attention_forward_no_dropout_inplace"
SIGNATURE = torch.ops.aten._flash_attention_forward_no_dropout_inplace.default._schema


def forward(
    out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *rest, **more
):
    """Return the natural log-sum-exp, float32 [H, T], NaN where no sequence is."""
    assert not any(rest), "no mask for debugging"
    assert not dropout_p, "no dropout"
    left, right = more["window_size_left"], more["window_size_right"]
    used = more["seqused_k"]
    assert not {"alibi_slopes", "block_table", "num_splits"} & more.keys()
    num_rows, num_heads, head_dim = query.shape
    groups = num_heads // key.shape[1]
    assert head_dim % 8 == 0
    assert head_dim <= 256
    assert groups * key.shape[1] == num_heads
    assert key.shape == value.shape
    assert out.shape == query.shape
    assert all(x.stride(-1) == 1 and x.dtype == query.dtype for x in (out, query, key, value))
    for x in (cum_seq_q, cum_seq_k, used):
        assert x.dtype == torch.int32
        assert x.is_contiguous()
    num_seqs = len(used)
    assert len(cum_seq_q) == len(cum_seq_k) == num_seqs + 1
    scale = more.get("scale") or head_dim**-0.5
    if is_causal:
        right = 0
    sums = torch.full((num_heads, num_rows), torch.nan)
    query_starts, key_starts = cum_seq_q.tolist(), cum_seq_k.tolist()
    assert query_starts == sorted(query_starts)
    assert query_starts[-1] <= num_rows
    for seq, num_keys in enumerate(used.tolist()):
        rows = slice(query_starts[seq], query_starts[seq + 1])
        num_queries = rows.stop - rows.start
        assert num_queries <= max_q, "the launch is too small"
        assert num_keys <= max_k
        if not num_queries:
            continue
        keys = slice(key_starts[seq], key_starts[seq] + num_keys)
        assert keys.stop <= len(key), "keys behind the last one"
        places = torch.arange(num_queries).unsqueeze(1) + num_keys - num_queries
        distance = torch.arange(num_keys) - places
        is_hidden = (distance > right) | (distance < -left if left >= 0 else distance > num_keys)
        k, v = (x[keys].float().repeat_interleave(groups, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), k) * scale
        scores.masked_fill_(is_hidden, -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
        sums[:, rows] = scores.logsumexp(-1)
    return sums


@contextmanager
def on_cpu():
    """Let torch find `forward` for tensors of a CPU."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(NAME, forward, "CPU")
        yield
    finally:
        library._destroy()
