// Making a model: limits, memory, weights. What a step does is in layer_phases.cpp and output_layer.cpp.
#include "model.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "row_math.h"

namespace fp {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

size_t rounded(size_t floats) { return (floats + 15) / 16 * 16; }

void check_multiple(const char* name, int value, int of, int limit) {
    if (value < of || value > limit || value % of) {
        fail(FP_UNSUPPORTED, "%s is %d, must be a multiple of %d up to %d", name, value, of, limit);
    }
}

void check_count(const char* name, int value, int low, int high) {
    if (value < low || value > high) fail(FP_INVALID, "%s is %d, must be %d to %d", name, value, low, high);
}

// The step computes a head's angles once for every position: cosines and sines [max_context, head_dim / 2].
void fill_rope(const fp_model_spec& spec, float theta, const std::vector<float>& factors, float* cosines, float* sines) {
    const int half = spec.head_dim / 2;
    for (int i = 0; i < half; ++i) {
        double frequency = std::pow(static_cast<double>(theta), -2.0 * i / spec.head_dim);
        if (!factors.empty()) frequency /= factors[i];
        for (int position = 0; position < spec.max_context; ++position) {
            cosines[static_cast<size_t>(position) * half + i] = static_cast<float>(std::cos(position * frequency));
            sines[static_cast<size_t>(position) * half + i] = static_cast<float>(std::sin(position * frequency));
        }
    }
}

}  // namespace

QuantisedRows::QuantisedRows(int rows, int k, bool floats) : k_(k), floats_(floats) {
    const size_t blocks = static_cast<size_t>(ceil_div(rows, kRowGroup)) * kRowGroup * (k / kBlock);
    q8_ = Buffer<int8_t>(blocks * kBlock);
    q16_ = Buffer<int16_t>(blocks * kBlock);
    d8_ = Buffer<float>(blocks);
    s8_ = Buffer<float>(blocks);
    d16_ = Buffer<float>(blocks);
    if (floats) f32_ = Buffer<float>(blocks * kBlock);
}

void QuantisedRows::put(int row, int column, const float* x, int count) {
    if (floats_) {
        memcpy(f32_.data() + static_cast<size_t>(row) * k_ + column, x, count * sizeof(float));
        return;
    }
    for (int i = 0; i < count; i += kBlock) {
        const size_t block = block_index(row, (column + i) / kBlock, k_ / kBlock);
        if (int8_) quantise_int8(x + i, &q8_[block * kBlock], &d8_[block], &s8_[block]);
        if (int16_) quantise_int16(x + i, &q16_[block * kBlock], &d16_[block]);
    }
}

Activations QuantisedRows::view() const {
    return {k_, q8_.data(), d8_.data(), s8_.data(), q16_.data(), d16_.data(), f32_.data()};
}

Model::Model(const fp_model_spec& spec, ThreadPool& pool)
    : spec_(spec), pool_(pool), attention_((check_spec(), AttentionShape{spec.num_q_heads, spec.num_kv_heads, spec.head_dim})) {
    products_ = &products_for(spec.variant, &variant_);
    layer_specs_.assign(spec.layers, spec.layers + spec.num_layers);
    spec_.layers = layer_specs_.data();
    layers_.resize(spec.num_layers);
    for (int i = 0; i < spec.num_layers; ++i) {
        layers_[i].spec = layer_specs_[i];
        layers_[i].index_in_group = layers_in_group_[layer_specs_[i].group]++;
    }
    reserve(spec.num_pages);
    const size_t tokens = spec.max_tokens, wide = static_cast<size_t>(spec.num_q_heads) * spec.head_dim;
    x_ = Buffer<float>(tokens * spec.hidden_size);
    projected_ = Buffer<float>(tokens * spec.hidden_size);
    q_ = Buffer<float>(tokens * wide);
    attended_ = Buffer<float>(tokens * wide);
    final_ = Buffer<float>(tokens * spec.hidden_size);
    const bool floats = products_->reads_floats;
    normed_ = QuantisedRows(spec.max_tokens, spec.hidden_size, floats);
    attended_rows_ = QuantisedRows(spec.max_tokens, static_cast<int>(wide), floats);
    ffn_rows_ = QuantisedRows(spec.max_tokens, spec.ffn_size, floats);
    out_rows_ = QuantisedRows(spec.max_tokens, spec.hidden_size, floats);
    best_ = Buffer<BestLogits>(static_cast<size_t>(ThreadPool::kMaxThreads) * tokens);
    const size_t widest_k = std::max({static_cast<size_t>(spec.hidden_size), wide, static_cast<size_t>(spec.ffn_size)});
    const size_t rows = rounded(tokens * std::max(spec.head_dim, 2 * kPanel)), rows2 = rounded(tokens * 2 * kPanel);
    const size_t unpacked = rounded(floats ? widest_k * kPanel : kUnpackedFloats), bytes = kUnpackedBytes / sizeof(float);
    const size_t each = rows + rows2 + unpacked + bytes;
    scratch_ = Buffer<float>(each * ThreadPool::kMaxThreads);  // memory of threads that never run is never touched
    for (int i = 0; i < ThreadPool::kMaxThreads; ++i) {
        float* at = scratch_.data() + i * each;
        threads_.push_back({at, at + rows, {reinterpret_cast<uint8_t*>(at + rows + rows2 + unpacked), at + rows + rows2}});
    }
}

void Model::reserve(const int32_t* num_pages) {
    for (int i = 0; i < spec_.num_groups; ++i) check_count("num_pages", num_pages[i], 2, 1 << 26);
    const size_t page_elements = static_cast<size_t>(spec_.num_kv_heads) * 2 * kPage * spec_.head_dim;
    Buffer<uint16_t> pages[FP_MAX_GROUPS];
    for (int i = 0; i < spec_.num_groups; ++i) pages[i] = Buffer<uint16_t>(page_elements * num_pages[i] * layers_in_group_[i]);
    for (int i = 0; i < spec_.num_groups; ++i) {
        kv_[i] = std::move(pages[i]);
        spec_.num_pages[i] = num_pages[i];
    }
}

void Model::check_spec() const {
    check_count("num_layers", spec_.num_layers, 1, 1024);
    check_multiple("hidden_size", spec_.hidden_size, kBlock, 1 << 16);
    check_multiple("head_dim", spec_.head_dim, kBlock, 512);
    check_multiple("ffn_size", spec_.ffn_size, kBlock, 1 << 20);
    check_count("num_kv_heads", spec_.num_kv_heads, 1, 1024);
    check_count("num_q_heads", spec_.num_q_heads, spec_.num_kv_heads, 1024);
    if (spec_.num_q_heads % spec_.num_kv_heads) {
        fail(FP_INVALID, "num_q_heads is %d, not a multiple of num_kv_heads %d", spec_.num_q_heads, spec_.num_kv_heads);
    }
    check_count("vocab_size", spec_.vocab_size, 1, 1 << 24);
    check_count("max_context", spec_.max_context, 1, 1 << 22);
    check_count("max_rows", spec_.max_rows, 1, 1 << 14);
    check_count("max_tokens", spec_.max_tokens, spec_.max_rows, 1 << 16);
    check_count("num_groups", spec_.num_groups, 1, FP_MAX_GROUPS);
    for (int i = 0; i < spec_.num_layers; ++i) {
        check_count("layer group", spec_.layers[i].group, 0, spec_.num_groups - 1);
        check_count("layer rope", spec_.layers[i].rope, 0, FP_MAX_ROPES - 1);
        check_count("layer window", spec_.layers[i].window, 0, INT32_MAX);
    }
}

namespace {

struct MatrixPlace {
    PackedMatrix* matrix;
    int n, k;
};

struct VectorPlace {
    std::vector<float>* values;
    int n;
};

MatrixPlace matrix_of(Layer& layer, const fp_model_spec& spec, int role) {
    const int wide = spec.num_q_heads * spec.head_dim, narrow = spec.num_kv_heads * spec.head_dim;
    switch (role) {
        case FP_Q: return {&layer.q, wide, spec.hidden_size};
        case FP_K: return {&layer.k, narrow, spec.hidden_size};
        case FP_V: return {&layer.v, narrow, spec.hidden_size};
        case FP_O: return {&layer.o, spec.hidden_size, wide};
        case FP_GATE: return {&layer.gate, spec.ffn_size, spec.hidden_size};
        case FP_UP: return {&layer.up, spec.ffn_size, spec.hidden_size};
        case FP_DOWN: return {&layer.down, spec.hidden_size, spec.ffn_size};
        default: return {nullptr, 0, 0};
    }
}

VectorPlace vector_of(Layer& layer, const fp_model_spec& spec, int role) {
    switch (role) {
        case FP_ATTN_NORM: return {&layer.attn_norm, spec.hidden_size};
        case FP_FFN_NORM: return {&layer.ffn_norm, spec.hidden_size};
        case FP_POST_ATTN_NORM: return {&layer.post_attn_norm, spec.hidden_size};
        case FP_POST_FFN_NORM: return {&layer.post_ffn_norm, spec.hidden_size};
        case FP_Q_BIAS: return {&layer.q_bias, spec.num_q_heads * spec.head_dim};
        case FP_K_BIAS: return {&layer.k_bias, spec.num_kv_heads * spec.head_dim};
        case FP_V_BIAS: return {&layer.v_bias, spec.num_kv_heads * spec.head_dim};
        case FP_Q_NORM: return {&layer.q_norm, spec.head_dim};
        case FP_K_NORM: return {&layer.k_norm, spec.head_dim};
        default: return {nullptr, 0};
    }
}

void check_bytes(int role, int layer, int64_t given, size_t expected) {
    if (given == static_cast<int64_t>(expected)) return;
    fail(FP_INVALID, "tensor of role %d, layer %d has %lld bytes, must have %zu", role, layer, static_cast<long long>(given), expected);
}

void set_vector(VectorPlace place, int role, int layer, int type, const uint8_t* data, int64_t num_bytes) {
    if (type != kF32) fail(FP_UNSUPPORTED, "tensor of role %d, layer %d has type %d, must be F32", role, layer, type);
    check_bytes(role, layer, num_bytes, place.n * sizeof(float));
    place.values->resize(place.n);
    memcpy(place.values->data(), data, num_bytes);
}

}  // namespace

void Model::set_tensor(int role, int layer, int type, const uint8_t* data, int64_t num_bytes) {
    if (sealed_) fail(FP_INVALID, "the model is sealed: its weights are final");
    if (!data) fail(FP_INVALID, "tensor data is missing");
    const size_t table_bytes = role <= FP_OUTPUT ? row_bytes(type, spec_.hidden_size) * spec_.vocab_size : 0;
    if (role == FP_TOKEN_EMBEDDING) {
        check_bytes(role, layer, num_bytes, table_bytes);
        embedding_type_ = type;
        embedding_ = Buffer<uint8_t>(num_bytes);
        memcpy(embedding_.data(), data, num_bytes);
    } else if (role == FP_OUTPUT) {
        check_bytes(role, layer, num_bytes, table_bytes);
        output_ = PackedMatrix(pool_, type, data, spec_.vocab_size, spec_.hidden_size);
    } else if (role == FP_OUTPUT_NORM) {
        set_vector({&output_norm_, spec_.hidden_size}, role, layer, type, data, num_bytes);
    } else if (role == FP_ROPE_FACTORS) {
        set_vector({&rope_factors_, spec_.head_dim / 2}, role, layer, type, data, num_bytes);
    } else {
        check_count("layer", layer, 0, spec_.num_layers - 1);
        const MatrixPlace matrix = matrix_of(layers_[layer], spec_, role);
        const VectorPlace vector = vector_of(layers_[layer], spec_, role);
        if (matrix.matrix) {
            check_bytes(role, layer, num_bytes, row_bytes(type, matrix.k) * matrix.n);
            *matrix.matrix = PackedMatrix(pool_, type, data, matrix.n, matrix.k);
        } else if (vector.values) {
            set_vector(vector, role, layer, type, data, num_bytes);
        } else {
            fail(FP_INVALID, "tensor role %d is unknown", role);
        }
    }
}

void Model::seal() {
    if (embedding_.size() == 0) fail(FP_INVALID, "the token embedding is missing");
    if (output_norm_.empty()) fail(FP_INVALID, "the output norm is missing");
    if (output_.empty()) output_ = PackedMatrix(pool_, embedding_type_, embedding_.data(), spec_.vocab_size, spec_.hidden_size);
    for (int i = 0; i < spec_.num_layers; ++i) {
        Layer& layer = layers_[i];
        for (int role : {FP_Q, FP_K, FP_V, FP_O, FP_GATE, FP_UP, FP_DOWN}) {
            if (matrix_of(layer, spec_, role).matrix->empty()) fail(FP_INVALID, "tensor of role %d, layer %d is missing", role, i);
        }
        if (layer.attn_norm.empty() || layer.ffn_norm.empty()) fail(FP_INVALID, "a norm of layer %d is missing", i);
        for (const PackedMatrix* matrix : {&layer.q, &layer.k, &layer.v, &layer.gate, &layer.up}) normed_.want(*matrix);
        attended_rows_.want(layer.o);
        ffn_rows_.want(layer.down);
    }
    out_rows_.want(output_);
    for (int rope = 0; rope < FP_MAX_ROPES; ++rope) {
        const auto uses = [&](const fp_layer_spec& layer) { return layer.rope == rope; };
        if (std::none_of(layer_specs_.begin(), layer_specs_.end(), uses)) continue;
        const size_t angles = static_cast<size_t>(spec_.max_context) * (spec_.head_dim / 2);
        cosines_[rope] = Buffer<float>(angles);
        sines_[rope] = Buffer<float>(angles);
        fill_rope(spec_, spec_.rope_theta[rope], rope == 0 ? rope_factors_ : std::vector<float>{}, cosines_[rope].data(), sines_[rope].data());
    }
    sealed_ = true;
}

int64_t Model::weight_bytes() const {
    size_t bytes = output_.num_bytes() + embedding_.size();
    for (const Layer& layer : layers_) {
        for (const PackedMatrix* matrix : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
            bytes += matrix->num_bytes();
        }
    }
    return static_cast<int64_t>(bytes);
}

Buffer<uint16_t>& Model::kv(int group) {
    check_count("group", group, 0, spec_.num_groups - 1);
    return kv_[group];
}

void Model::bind(const fp_step& step) {
    if (!sealed_) fail(FP_INVALID, "the model is not sealed: a tensor may be missing");
    check_step(step, spec_);
    step_ = step;
    attention_.plan(step.num_rows, step.qo_indptr, step.seq_lens, pool_.threads());
}

void Model::run_phase(int phase) {
    check_count("phase", phase, 0, num_phases() - 1);
    if (step_.num_tokens == 0) fail(FP_INVALID, "no step is bound");
    const double begin = now();
    const int in_layer = (phase - 1) % kPhasesPerLayer;
    int part = 0;
    if (phase == 0) {
        run_embedding();
    } else if (phase == num_phases() - 1) {
        run_output();
        part = kNumTimes - 1;
    } else {
        Layer& layer = layers_[(phase - 1) / kPhasesPerLayer];
        part = 1 + in_layer;
        switch (in_layer) {
            case 0: run_qkv(layer); break;
            case 1: run_attention(layer); break;
            case 2: run_projection(layer.o, attended_rows_, layer.post_attn_norm); break;
            case 3: run_gate_up(layer); break;
            default: run_projection(layer.down, ffn_rows_, layer.post_ffn_norm); break;
        }
    }
    times_[part] += now() - begin;
}

void Model::step(const fp_step& step) {
    bind(step);
    for (int phase = 0; phase < num_phases(); ++phase) run_phase(phase);
}

void Model::take_times(double* seconds) {
    std::copy(times_, times_ + kNumTimes, seconds);
    std::fill(times_, times_ + kNumTimes, 0.0);
}

}  // namespace fp
