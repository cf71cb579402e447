// What is done to one row of floats between two products: norms, rotation, activation function, quantisation.
#pragma once
#include "common.h"

namespace fp {

// out = x / rms(x) * weight, over n values, n a multiple of 8. `out` may be `x`.
void rms_norm(const float* x, const float* weight, int n, float epsilon, float* out);

// 32 values as int8: x ~ q * d, with s = d * (sum of q).
void quantise_int8(const float* x, int8_t* q, float* d, float* s);
// 32 values as int16: x ~ q * d.
void quantise_int16(const float* x, int16_t* q, float* d);

// Rotates one head of `dim` values by the angles whose cosines and sines are given, [dim / 2] each.
void rotate_interleaved(float* head, const float* cosines, const float* sines, int dim);  // pairs (2 i, 2 i + 1)
void rotate_halves(float* head, const float* cosines, const float* sines, int dim);       // pairs (i, i + dim / 2)

// gate = activation(gate) * up, over n values, n a multiple of 8.
void gated_silu(float* gate, const float* up, int n);
void gated_gelu_tanh(float* gate, const float* up, int n);

// x += y, x *= factor, over n values, n a multiple of 8.
void add_to(float* x, const float* y, int n);
void scale_by(float* x, float factor, int n);

bool all_finite(const float* x, int n);

}  // namespace fp
