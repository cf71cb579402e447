// The check products and the choice among the instruction sets.
#include "products.h"

#include <cpuid.h>
#include <cstring>

#include "simd.h"

namespace fp {
namespace {

float half_of(const uint8_t* at, int index) {
    uint16_t bits;
    memcpy(&bits, at + 2 * index, sizeof bits);
    return half_to_float(bits);
}

float float_of(const uint8_t* at, int index) {
    float value;
    memcpy(&value, at + 4 * index, sizeof value);
    return value;
}

// The weight of input `i` and column `c` in a panel block, straight from the layout in packed_matrix.h.
template <Packing P>
float weight_at(const uint8_t* block, int i, int c) {
    if constexpr (P == Packing::kNibblesHalf || P == Packing::kNibblesFloat) {
        const uint8_t byte = block[i / 8 * 64 + c * 4 + i % 4];
        const auto q = static_cast<float>(i % 8 < 4 ? byte & 15 : byte >> 4);
        const uint8_t* scales = block + kPanel * kBlock / 2;
        if constexpr (P == Packing::kNibblesHalf) return half_of(scales, c) * q + half_of(scales, kPanel + c);
        return float_of(scales, c) * q + float_of(scales, kPanel + c);
    } else {
        const auto q = static_cast<float>(static_cast<int8_t>(block[i / 2 * 32 + c * 2 + i % 2]));
        const uint8_t* scales = block + kPanel * kBlock;
        if constexpr (P == Packing::kBytesHalf) return half_of(scales, c) * q;
        return float_of(scales, i / 16 * kPanel + c) * q;
    }
}

// R rows times the panel's weights as floats, [k][16].
template <int R>
void check_rows(const float* weights, const Activations& x, int row, float* out, size_t stride) {
    const float* from = x.f32 + static_cast<size_t>(row) * x.k;
    __m256 sums[2 * R];
    for (__m256& sum : sums) sum = _mm256_setzero_ps();
    for (int i = 0; i < x.k; ++i) {
        const __m256 low = _mm256_loadu_ps(weights + i * kPanel), high = _mm256_loadu_ps(weights + i * kPanel + 8);
        for (int r = 0; r < R; ++r) {
            const __m256 value = _mm256_broadcast_ss(from + static_cast<size_t>(r) * x.k + i);
            sums[2 * r] = _mm256_fmadd_ps(value, low, sums[2 * r]);
            sums[2 * r + 1] = _mm256_fmadd_ps(value, high, sums[2 * r + 1]);
        }
    }
    for (int r = 0; r < 2 * R; ++r) _mm256_storeu_ps(out + r / 2 * stride + r % 2 * 8, sums[r]);
}

template <Packing P>
void check_product(const uint8_t* panel, const Activations& x, int count, float* out, size_t stride,
                   const ProductScratch& scratch) {
    float* weights = scratch.floats;
    const size_t block_bytes = panel_block_bytes(P);
    for (int i = 0; i < x.k; ++i) {
        for (int c = 0; c < kPanel; ++c) weights[i * kPanel + c] = weight_at<P>(panel + i / kBlock * block_bytes, i % kBlock, c);
    }
    int row = 0;
    for (; row + 4 <= count; row += 4) check_rows<4>(weights, x, row, out + row * stride, stride);
    for (; row < count; ++row) check_rows<1>(weights, x, row, out + row * stride, stride);
}

// What the CPU has and the system keeps over a switch of threads. Asked here: not every compiler's __builtin_cpu_supports is
// filled in a shared library (zig's answers no to everything).
struct Machine {
    bool has_avx2 = false;
    bool has_avx512 = false;

    Machine() {
        constexpr unsigned kFma = 1u << 12, kSaved = 1u << 27, kHalf = 1u << 29;  // leaf 1, ecx
        constexpr unsigned kAvx2 = 1u << 5;  // leaf 7, ebx
        constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // leaf 7, ebx: F, DQ, BW, VL
        constexpr unsigned kVnni = 1u << 11;  // leaf 7, ecx
        constexpr unsigned kYmm = 0x06, kZmm = 0xe6;  // of the saved states
        unsigned eax, ebx, ecx, edx, more_eax, more_ebx, more_ecx, more_edx;
        if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return;
        if (!__get_cpuid_count(7, 0, &more_eax, &more_ebx, &more_ecx, &more_edx)) return;
        constexpr unsigned kNeeded = kFma | kSaved | kHalf;
        if ((ecx & kNeeded) != kNeeded) return;
        unsigned saved, upper;
        asm volatile("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
        has_avx2 = (saved & kYmm) == kYmm && (more_ebx & kAvx2);
        has_avx512 = has_avx2 && (saved & kZmm) == kZmm && (more_ebx & kAvx512) == kAvx512 && (more_ecx & kVnni);
    }
};

const Machine& machine() {
    static const Machine found;
    return found;
}

bool has_avx2() { return machine().has_avx2; }

bool has_avx512() { return machine().has_avx512; }

}  // namespace

const ProductTable kCheckProducts = {check_product<Packing::kNibblesHalf>, check_product<Packing::kNibblesFloat>,
                                     check_product<Packing::kBytesHalf>, check_product<Packing::kBytesSplit>, true};

bool supports(int variant) {
    switch (variant) {
        case FP_AUTO:
        case FP_AVX2:
        case FP_CHECK: return has_avx2();
        case FP_AVX512_VNNI: return has_avx512();
        default: return false;
    }
}

const ProductTable& products_for(int variant, int* chosen) {
    if (!supports(variant)) fail(FP_UNSUPPORTED, "this machine lacks the instructions of variant %d", variant);
    *chosen = variant != FP_AUTO ? variant : has_avx512() ? FP_AVX512_VNNI : FP_AVX2;
    switch (*chosen) {
        case FP_AVX512_VNNI: return kAvx512Products;
        case FP_CHECK: return kCheckProducts;
        default: return kAvx2Products;
    }
}

}  // namespace fp
