// The C functions: they turn failures into codes and do nothing else.
#include "fp_api.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "model.h"
#include "products.h"
#include "row_math.h"
#include "thread_pool.h"

using namespace fp;

struct fp_pool {
    ThreadPool threads;
    // Of fp_paged_attention, kept between calls for its memory: one shape at a time.
    std::unique_ptr<Attention> attention;
    AttentionShape shape{};
    std::vector<float> scaled;

    Attention& attention_of(const AttentionShape& wanted) {
        const bool is_kept = attention && shape.num_q_heads == wanted.num_q_heads &&
                             shape.num_kv_heads == wanted.num_kv_heads && shape.head_dim == wanted.head_dim;
        if (!is_kept) attention = std::make_unique<Attention>(wanted);
        shape = wanted;
        return *attention;
    }
};

struct fp_model {
    Model model;
};

namespace {

int32_t report(fp_error* err, fp_status status, const char* text) {
    if (err) snprintf(err->text, sizeof err->text, "%s", text);
    return status;
}

// Runs `body`; nothing that it throws leaves the library.
template <class Body>
int32_t guarded(fp_error* err, const Body& body) {
    try {
        body();
        return FP_OK;
    } catch (const Failure& failure) {
        return report(err, failure.status, failure.text);
    } catch (const std::bad_alloc&) {
        return report(err, FP_MEMORY, "the system gives no more memory");
    } catch (...) {
        return report(err, FP_INTERNAL, "the kernel library failed");
    }
}

void check_threads(int threads) {
    if (threads < 1 || threads > ThreadPool::kMaxThreads) {
        fail(FP_INVALID, "threads is %d, must be 1 to %d", threads, ThreadPool::kMaxThreads);
    }
}

void check_present(const char* name, const void* pointer) {
    if (!pointer) fail(FP_INVALID, "%s is missing", name);
}

}  // namespace

const char* fp_version() { return "0.1"; }

void fp_struct_bytes(int64_t* bytes_5) {
    const size_t sizes[] = {sizeof(fp_layer_spec), sizeof(fp_model_spec), sizeof(fp_pages), sizeof(fp_step), sizeof(fp_attention)};
    std::copy(std::begin(sizes), std::end(sizes), bytes_5);
}

int32_t fp_supports(int32_t variant) { return supports(variant); }

int32_t fp_pool_create(int32_t threads, int32_t spin_us, fp_pool** out, fp_error* err) {
    return guarded(err, [&] {
        check_present("out", out);
        check_threads(threads);
        if (spin_us < 0 || spin_us > 1000) fail(FP_INVALID, "spin_us is %d, must be 0 to 1000", spin_us);
        *out = new fp_pool{{threads, spin_us}};
    });
}

int32_t fp_pool_set_threads(fp_pool* pool, int32_t threads, fp_error* err) {
    return guarded(err, [&] {
        check_present("pool", pool);
        check_threads(threads);
        pool->threads.set_threads(threads);
    });
}

void fp_pool_destroy(fp_pool* pool) { delete pool; }

int32_t fp_pool_ceilings(fp_pool* pool, double* per_second_2, fp_error* err) {
    return guarded(err, [&] {
        check_present("pool", pool);
        check_present("per_second_2", per_second_2);
        per_second_2[0] = read_bytes_per_second(pool->threads);
        per_second_2[1] = int8_operations_per_second(pool->threads);
    });
}

int32_t fp_model_create(const fp_model_spec* spec, fp_pool* pool, fp_model** out, fp_error* err) {
    return guarded(err, [&] {
        check_present("spec", spec);
        check_present("spec.layers", spec->layers);
        check_present("pool", pool);
        check_present("out", out);
        *out = new fp_model{{*spec, pool->threads}};
    });
}

int32_t fp_model_set_tensor(fp_model* model, int32_t role, int32_t layer, int32_t type, const void* data, int64_t num_bytes,
                            fp_error* err) {
    return guarded(err, [&] {
        if (role < 0 || role >= FP_NUM_ROLES) fail(FP_INVALID, "role is %d, must be 0 to %d", role, FP_NUM_ROLES - 1);
        model->model.set_tensor(role, layer, type, static_cast<const uint8_t*>(data), num_bytes);
    });
}

int32_t fp_model_logits(fp_model* model, const float* states, int32_t num_states, float* logits, fp_error* err) {
    return guarded(err, [&] { model->model.logits_of(states, num_states, logits); });
}

int32_t fp_model_seal(fp_model* model, fp_error* err) {
    return guarded(err, [&] { model->model.seal(); });
}

int32_t fp_model_reserve(fp_model* model, const int32_t* num_pages, fp_error* err) {
    return guarded(err, [&] {
        check_present("num_pages", num_pages);
        model->model.reserve(num_pages);
    });
}

int32_t fp_model_variant(const fp_model* model) { return model->model.variant(); }

int64_t fp_model_weight_bytes(const fp_model* model) { return model->model.weight_bytes(); }

int32_t fp_model_kv(fp_model* model, int32_t group, uint16_t** data, int64_t* num_elements, fp_error* err) {
    return guarded(err, [&] {
        Buffer<uint16_t>& pages = model->model.kv(group);
        *data = pages.data();
        *num_elements = static_cast<int64_t>(pages.size());
    });
}

int32_t fp_model_bind(fp_model* model, const fp_step* step, fp_error* err) {
    return guarded(err, [&] { model->model.bind(*step); });
}

int32_t fp_model_step(fp_model* model, const fp_step* step, fp_error* err) {
    return guarded(err, [&] { model->model.step(*step); });
}

int32_t fp_model_num_phases(const fp_model* model) { return model->model.num_phases(); }

int32_t fp_model_run_phase(fp_model* model, int32_t phase, fp_error* err) {
    return guarded(err, [&] { model->model.run_phase(phase); });
}

int32_t fp_model_take_times(fp_model* model, double* seconds_7) {
    model->model.take_times(seconds_7);
    return FP_OK;
}

void fp_model_destroy(fp_model* model) { delete model; }

namespace {

void check_attention(const fp_attention& args) {
    if (args.num_rows < 1 || args.num_tokens < args.num_rows) {
        fail(FP_INVALID, "num_tokens is %d and num_rows %d: every row needs a token", args.num_tokens, args.num_rows);
    }
    if (args.head_dim < kBlock || args.head_dim % kBlock || args.head_dim > 512) {
        fail(FP_UNSUPPORTED, "head_dim is %d, must be a multiple of %d up to 512", args.head_dim, kBlock);
    }
    if (args.num_kv_heads < 1 || args.num_q_heads < 1 || args.num_q_heads % args.num_kv_heads) {
        fail(FP_INVALID, "num_q_heads is %d, not a multiple of num_kv_heads %d", args.num_q_heads, args.num_kv_heads);
    }
    if (args.window < 0) fail(FP_INVALID, "window is %d, must not be negative", args.window);
    check_present("q", args.q);
    check_present("kv", args.kv);
    check_present("out", args.out);
    check_rows(args.num_rows, args.num_tokens, args.qo_indptr, args.seq_lens);
    check_pages(args.pages, args.num_rows, args.qo_indptr, args.seq_lens, {args.num_pages, args.window});
}

}  // namespace

int32_t fp_paged_attention(fp_pool* pool, const fp_attention* args, fp_error* err) {
    return guarded(err, [&] {
        check_present("pool", pool);
        check_present("args", args);
        check_attention(*args);
        const AttentionShape shape = {args->num_q_heads, args->num_kv_heads, args->head_dim};
        std::vector<float>& scaled = pool->scaled;
        scaled.assign(args->q, args->q + static_cast<size_t>(args->num_tokens) * shape.num_q_heads * shape.head_dim);
        scale_by(scaled.data(), args->scale, static_cast<int>(scaled.size()));
        Attention& attention = pool->attention_of(shape);
        attention.plan(args->num_rows, args->qo_indptr, args->seq_lens, pool->threads.threads());
        const AttentionCall call = {shape, scaled.data(), args->kv, args->pages_are_f32 != 0, args->window,
                                    args->qo_indptr, args->seq_lens, &args->pages, args->out};
        attention.run(pool->threads, call, [](int, int, int) {});
    });
}

int32_t fp_linear(fp_pool* pool, int32_t variant, int32_t type, const void* weights, int64_t num_bytes, int32_t n, int32_t k,
                  const float* x, int32_t m, float* y, fp_error* err) {
    return guarded(err, [&] {
        check_present("pool", pool);
        check_present("weights", weights);
        check_present("x", x);
        check_present("y", y);
        if (n < 1 || k < kBlock || k % kBlock || m < 1) fail(FP_INVALID, "shape is m %d, n %d, k %d: k must be a multiple of %d", m, n, k, kBlock);
        if (num_bytes != static_cast<int64_t>(row_bytes(type, k) * n)) {
            fail(FP_INVALID, "weights have %lld bytes, must have %zu", static_cast<long long>(num_bytes), row_bytes(type, k) * n);
        }
        int chosen;
        const ProductTable& table = products_for(variant, &chosen);
        const PackedMatrix matrix(pool->threads, type, static_cast<const uint8_t*>(weights), n, k);
        QuantisedRows rows(m, k, table.reads_floats);
        rows.want(matrix);
        for (int row = 0; row < m; ++row) rows.put(row, 0, x + static_cast<size_t>(row) * k, k);
        std::vector<float> floats(std::max(kUnpackedFloats, static_cast<size_t>(k) * kPanel)), panel(static_cast<size_t>(m) * kPanel);
        std::vector<uint8_t> bytes(kUnpackedBytes + 64);
        auto* aligned = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
        for (int p = 0; p < matrix.num_panels(); ++p) {
            table.of(matrix.packing())(matrix.panel(p), rows.view(), m, panel.data(), kPanel, {aligned, floats.data()});
            const int columns = std::min(kPanel, n - p * kPanel);
            for (int row = 0; row < m; ++row) memcpy(y + static_cast<size_t>(row) * n + p * kPanel, &panel[static_cast<size_t>(row) * kPanel], columns * sizeof(float));
        }
    });
}

int32_t fp_top_k(const float* values, int32_t n, int32_t k, int32_t* ids, float* out_values, fp_error* err) {
    return guarded(err, [&] {
        check_present("values", values);
        check_present("ids", ids);
        check_present("out_values", out_values);
        if (n < 1 || k < 1 || k > n) fail(FP_INVALID, "k is %d, must be 1 to the row's length %d", k, n);
        const auto is_before = [&](int32_t a, int32_t b) {
            const bool a_nan = std::isnan(values[a]), b_nan = std::isnan(values[b]);
            if (a_nan != b_nan) return b_nan;
            if (!a_nan && values[a] != values[b]) return values[a] > values[b];
            return a < b;
        };
        // The best k so far, the worst of them in front: most values are turned away by one comparison with it.
        std::vector<int32_t> heap(k);
        for (int32_t i = 0; i < k; ++i) heap[i] = i;
        std::make_heap(heap.begin(), heap.end(), is_before);
        float worst = values[heap.front()];
        for (int32_t i = k; i < n; ++i) {
            if (values[i] <= worst || !is_before(i, heap.front())) continue;
            std::pop_heap(heap.begin(), heap.end(), is_before);
            heap.back() = i;
            std::push_heap(heap.begin(), heap.end(), is_before);
            worst = values[heap.front()];
        }
        std::sort_heap(heap.begin(), heap.end(), is_before);
        for (int32_t i = 0; i < k; ++i) {
            ids[i] = heap[i];
            out_values[i] = values[heap[i]];
        }
    });
}
