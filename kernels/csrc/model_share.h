// How a phase's work is cut into chunks of the pool.
#pragma once
#include <algorithm>

#include "model.h"

namespace fp {

constexpr size_t kLeastProducts = size_t{128} << 10;  // about a microsecond and a half of work: less is not worth a hand-over
constexpr size_t kLeastFloats = 4096;                 // rows of fewer floats in all are done by the caller alone

template <class Body>
void Model::share(int units, size_t products, const Body& body) {
    const int worth = static_cast<int>((kLeastProducts + products - 1) / products);
    const int fair = ceil_div(units, 2 * pool_.threads());
    const int least = ceil_div(units, ThreadPool::kMaxChunks);
    const int per_chunk = std::max({1, least, std::min(worth, fair)});
    pool_.run(ceil_div(units, per_chunk), [&](int chunk, int thread) {
        body(chunk * per_chunk, std::min(units, (chunk + 1) * per_chunk), thread);
    });
}

template <class Body>
void Model::for_rows(int rows, const Body& body) {
    const bool is_small = static_cast<size_t>(rows) * spec_.hidden_size < kLeastFloats;
    const int per_chunk = is_small ? std::max(rows, 1) : std::max(ceil_div(rows, 16 * pool_.threads()), 2);
    pool_.run(ceil_div(rows, per_chunk), [&](int chunk, int) {
        for (int row = chunk * per_chunk; row < rows && row < (chunk + 1) * per_chunk; ++row) body(row);
    });
}

inline void Model::multiply(const PackedMatrix& matrix, int panel, int panels, const QuantisedRows& x, int rows, float* out,
                            size_t stride, int thread) {
    const PanelProduct product = products_->of(matrix.packing());
    const Activations view = x.view();
    for (int i = 0; i < panels; ++i) product(matrix.panel(panel + i), view, rows, out + i * kPanel, stride, threads_[thread].product);
}

}  // namespace fp
