// Proves that a step stays inside every array before anything is read through it.
#include <algorithm>

#include "model.h"

namespace fp {
namespace {

void check_range(const char* name, int64_t at, int64_t value, int64_t low, int64_t high) {
    if (value >= low && value <= high) return;
    fail(FP_INVALID, "%s[%lld] is %lld, must be %lld to %lld", name, static_cast<long long>(at), static_cast<long long>(value),
         static_cast<long long>(low), static_cast<long long>(high));
}

void check_count(const char* name, int value, int low, int high) {
    if (value < low || value > high) fail(FP_INVALID, "%s is %d, must be %d to %d", name, value, low, high);
}

void check_present(const char* name, const void* array) {
    if (!array) fail(FP_INVALID, "%s is missing", name);
}

void check_tokens(const fp_step& step, const fp_model_spec& spec) {
    for (int i = 0; i < step.num_tokens; ++i) check_range("input_ids", i, step.input_ids[i], 0, spec.vocab_size - 1);
    for (int row = 0; row < step.num_rows; ++row) {
        check_range("seq_lens", row, step.seq_lens[row], 1, spec.max_context);
        const int begin = step.qo_indptr[row], end = step.qo_indptr[row + 1];
        for (int i = begin; i < end; ++i) {
            const int64_t position = step.seq_lens[row] - (end - i);
            check_range("positions", i, step.positions[i], position, position);
        }
    }
}

void check_outputs(const fp_step& step) {
    for (int i = 0; i < step.num_out; ++i) {
        check_range("out_tokens", i, step.out_tokens[i], 0, step.num_tokens - 1);
        check_range("logits_slot", i, step.logits_slot[i], -1, step.num_logits - 1);
    }
    if (step.num_logits > 0) check_present("logits", step.logits);
}

}  // namespace

void check_rows(int num_rows, int num_tokens, const int32_t* qo_indptr, const int32_t* seq_lens) {
    check_present("qo_indptr", qo_indptr);
    check_present("seq_lens", seq_lens);
    check_range("qo_indptr", 0, qo_indptr[0], 0, 0);
    for (int row = 0; row < num_rows; ++row) {
        check_range("qo_indptr", row + 1, qo_indptr[row + 1], qo_indptr[row] + 1, num_tokens);
        check_range("seq_lens", row, seq_lens[row], qo_indptr[row + 1] - qo_indptr[row], INT32_MAX);
    }
    check_range("qo_indptr", num_rows, qo_indptr[num_rows], num_tokens, num_tokens);
}

void check_pages(const fp_pages& pages, int num_rows, const int32_t* qo_indptr, const int32_t* seq_lens, PageLimits limits) {
    check_present("kv_indptr", pages.kv_indptr);
    check_present("kv_indices", pages.kv_indices);
    check_range("kv_indptr", 0, pages.kv_indptr[0], 0, 0);
    for (int row = 0; row < num_rows; ++row) {
        const int start = pages.start_positions ? pages.start_positions[row] : 0;
        const int first_position = seq_lens[row] - (qo_indptr[row + 1] - qo_indptr[row]);
        const int first_read = limits.window ? std::max(0, first_position + 1 - limits.window) : 0;
        check_range("start_positions", row, start, 0, first_read);
        if (start % kPage) fail(FP_INVALID, "start_positions[%d] is %d, not a multiple of the page size %d", row, start, kPage);
        const int needed = ceil_div(seq_lens[row] - start, kPage);
        check_range("kv_indptr", row + 1, pages.kv_indptr[row + 1], static_cast<int64_t>(pages.kv_indptr[row]) + needed, INT32_MAX);
        for (int i = pages.kv_indptr[row]; i < pages.kv_indptr[row + 1]; ++i) {
            check_range("kv_indices", i, pages.kv_indices[i], 0, limits.num_pages - 1);
        }
    }
}

void check_step(const fp_step& step, const fp_model_spec& spec) {
    check_count("num_rows", step.num_rows, 1, spec.max_rows);
    check_count("num_tokens", step.num_tokens, step.num_rows, spec.max_tokens);
    check_count("num_out", step.num_out, 0, spec.max_tokens);
    check_count("num_logits", step.num_logits, 0, spec.max_tokens);
    check_present("input_ids", step.input_ids);
    check_present("positions", step.positions);
    check_present("finite", step.finite);
    if (step.num_out > 0) {
        check_present("out_tokens", step.out_tokens);
        check_present("logits_slot", step.logits_slot);
        check_present("best_ids", step.best_ids);
        check_present("best_logits", step.best_logits);
    }
    check_rows(step.num_rows, step.num_tokens, step.qo_indptr, step.seq_lens);
    check_tokens(step, spec);
    for (int group = 0; group < spec.num_groups; ++group) {
        int window = INT32_MAX;  // the widest of the group's layers, 0 (all) being wider than any
        for (int i = 0; i < spec.num_layers; ++i) {
            if (spec.layers[i].group != group) continue;
            const int of_layer = spec.layers[i].window;
            window = window == INT32_MAX ? of_layer : window == 0 || of_layer == 0 ? 0 : std::max(window, of_layer);
        }
        const fp_pages& pages = step.pages[group];
        check_pages(pages, step.num_rows, step.qo_indptr, step.seq_lens, {spec.num_pages[group], window == INT32_MAX ? 0 : window});
        check_present("out_cache_loc", pages.out_cache_loc);
        for (int i = 0; i < step.num_tokens; ++i) {
            check_range("out_cache_loc", i, pages.out_cache_loc[i], 0, static_cast<int64_t>(spec.num_pages[group]) * kPage - 1);
        }
    }
    check_outputs(step);
}

}  // namespace fp
