"""Quantised weights and activations, in plain NumPy: blocks of 32, and the super-blocks of 256 of the K types."""

import numpy as np

Array = np.ndarray
BLOCK = 32


def dequantise(raw: Array, tensor_type: int, shape: tuple[int, int]) -> Array:
    """The matrix `shape` of GGUF type number `tensor_type` stored in `raw` uint8, as float32."""
    readers = {2: _q4_0, 3: _q4_1, 6: _q5_0, 8: _q8_0, 12: _q4_k, 14: _q6_k}
    block_bytes = {2: 18, 3: 20, 6: 22, 8: 34, 12: 144, 14: 210}[tensor_type]
    return readers[tensor_type](raw.reshape(-1, block_bytes)).reshape(shape).astype(np.float32)


def linear(x: Array, weights: Array, *, levels: int) -> Array:
    """`x` [m, k], rounded to `levels` steps a block, times the transpose of `weights` [n, k]; sums in float64."""
    integers, scales = _quantise(x, levels)
    return (integers * scales.astype(np.float64)).reshape(x.shape) @ weights.astype(np.float64).T


def _quantise(x: Array, levels: int) -> tuple[Array, Array]:
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, BLOCK)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(levels), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(blocks * inverse), largest / np.float32(levels)


def _halves(blocks: Array, at: int, count: int = 1) -> Array:
    return blocks[:, at : at + 2 * count].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _q4_0(blocks: Array) -> Array:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)


def _q4_1(blocks: Array) -> Array:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]) + _halves(blocks, 2)


def _q5_0(blocks: Array) -> Array:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").astype(np.float32)
    return _halves(blocks, 0) * (_nibbles(blocks[:, 6:]) + 16 * fifth - 16)


def _q8_0(blocks: Array) -> Array:
    return _halves(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_k(blocks: Array) -> Array:
    packed = blocks[:, 4:16].astype(np.int32)
    low, high, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([high & 63, (mixed >> 4) | (high >> 6) << 4], axis=1)
    quads = blocks[:, 16:].reshape(-1, 4, 32)
    nibbles = np.stack([quads & 15, quads >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
    scale, least = _halves(blocks, 0) * scales, _halves(blocks, 2) * minima
    return scale[:, :, None] * nibbles - least[:, :, None]


def _q6_k(blocks: Array) -> Array:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2)
    pairs = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    integers = (nibbles | pairs << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    return (_halves(blocks, 208) * scales)[:, :, None] * integers
