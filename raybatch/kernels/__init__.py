"""All ops of a forward pass; no Ray, no engine state.

Shape letters of the whole package: T tokens in the forward pass, S sequences, H query heads, G KV
heads, D head dim, M model dim, F ffn dim, E experts, K top-k, L layers, N cache blocks, B block
size, V vocab, X max blocks per sequence, R elements of a row of the KV pool: D, or more if it is
quantized (`raybatch.kernels.byte_numbers`).
"""
