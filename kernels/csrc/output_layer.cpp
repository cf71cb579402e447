// The last phase: final norm, finite flags, and the output layer for the tokens whose distribution is wanted.
//
// The best id is found while the logits are in registers; they are written to memory only for rows that ask for them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "model_share.h"
#include "row_math.h"
#include "simd.h"

namespace fp {

void Model::run_output() {
    finish_rows();
    if (step_.num_out == 0) return;
    for (int thread = 0; thread < pool_.threads(); ++thread) {
        for (int i = 0; i < step_.num_out; ++i) {
            BestLogits& best = best_of(thread, i);
            std::fill(best.values, best.values + kPanel, -INFINITY);
            std::fill(best.panels, best.panels + kPanel, 0);
            std::fill(best.broken, best.broken + 8, 0);
        }
    }
    const size_t products = static_cast<size_t>(kPanel) * spec_.hidden_size * step_.num_out;
    share(output_.num_panels(), products / 8, [&](int begin, int end, int thread) {
        for (int panel = begin; panel < end; ++panel) output_panel(panel, thread);
    });
    choose_best();
}

// Normalises the last token of each row, for its flag and state, and the wanted tokens, for the product.
void Model::finish_rows() {
    const int hidden = spec_.hidden_size;
    for_rows(step_.num_rows, [&](int row) {
        const size_t token = step_.qo_indptr[row + 1] - 1;
        float* state = (step_.last_hidden ? step_.last_hidden : final_.data()) + static_cast<size_t>(row) * hidden;
        rms_norm(x_.data() + token * hidden, output_norm_.data(), hidden, spec_.rms_epsilon, state);
        step_.finite[row] = all_finite(state, hidden);
    });
    if (step_.all_hidden) {
        for_rows(step_.num_tokens, [&](int i) {
            const size_t at = static_cast<size_t>(i) * hidden;
            rms_norm(x_.data() + at, output_norm_.data(), hidden, spec_.rms_epsilon, step_.all_hidden + at);
        });
    }
    for_rows(step_.num_out, [&](int i) {
        float* state = final_.data() + static_cast<size_t>(i) * hidden;
        rms_norm(x_.data() + static_cast<size_t>(step_.out_tokens[i]) * hidden, output_norm_.data(), hidden, spec_.rms_epsilon, state);
        out_rows_.put(i, 0, state, hidden);
    });
}

void Model::logits_of(const float* states, int num_states, float* logits) {
    if (!sealed_) fail(FP_INVALID, "the model is not sealed: a tensor may be missing");
    if (num_states < 0 || num_states > spec_.max_tokens) {
        fail(FP_INVALID, "num_states is %d, must be 0 to %d", num_states, spec_.max_tokens);
    }
    if (num_states == 0) return;
    if (!states || !logits) fail(FP_INVALID, "%s is missing", states ? "logits" : "states");
    const int hidden = spec_.hidden_size;
    for_rows(num_states, [&](int i) { out_rows_.put(i, 0, states + static_cast<size_t>(i) * hidden, hidden); });
    const size_t products = static_cast<size_t>(kPanel) * hidden * num_states;
    share(output_.num_panels(), products / 8, [&](int begin, int end, int thread) {
        for (int panel = begin; panel < end; ++panel) {
            float* rows = threads_[thread].rows;
            multiply(output_, panel, 1, out_rows_, num_states, rows, kPanel, thread);
            const int columns = std::min(kPanel, spec_.vocab_size - panel * kPanel);
            for (int i = 0; i < num_states; ++i) {
                memcpy(logits + static_cast<size_t>(i) * spec_.vocab_size + panel * kPanel, rows + static_cast<size_t>(i) * kPanel,
                       columns * sizeof(float));
            }
        }
    });
}

void Model::output_panel(int panel, int thread) {
    float* logits = threads_[thread].rows;
    multiply(output_, panel, 1, out_rows_, step_.num_out, logits, kPanel, thread);
    const int columns = std::min(kPanel, spec_.vocab_size - panel * kPanel);
    const __m256i number = _mm256_set1_epi32(panel);
    for (int i = 0; i < step_.num_out; ++i, logits += kPanel) {
        std::fill(logits + columns, logits + kPanel, -INFINITY);  // columns that pad the last panel
        BestLogits& best = best_of(thread, i);
        auto* broken = reinterpret_cast<__m256i*>(best.broken);
        for (int at = 0; at < kPanel; at += 8) {
            const __m256 value = _mm256_loadu_ps(logits + at), before = _mm256_loadu_ps(best.values + at);
            const __m256 is_better = _mm256_cmp_ps(value, before, _CMP_GT_OQ);  // equal: the earlier panel stays
            const __m256i is_broken = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
            _mm256_storeu_si256(broken, _mm256_or_si256(_mm256_loadu_si256(broken), is_broken));
            auto* panels = reinterpret_cast<__m256i*>(best.panels + at);
            _mm256_storeu_ps(best.values + at, _mm256_blendv_ps(before, value, is_better));
            _mm256_storeu_si256(panels, _mm256_blendv_epi8(_mm256_loadu_si256(panels), number, _mm256_castps_si256(is_better)));
        }
        const int slot = step_.logits_slot[i];
        if (slot < 0) continue;
        memcpy(step_.logits + static_cast<size_t>(slot) * spec_.vocab_size + panel * kPanel, logits, columns * sizeof(float));
    }
}

// The best of all threads and columns; the lowest id among equals. NaN if any logit is: as an arg-max over them says.
void Model::choose_best() {
    for (int i = 0; i < step_.num_out; ++i) {
        float most = -INFINITY;
        int id = 0;
        bool is_broken = false;
        for (int thread = 0; thread < pool_.threads(); ++thread) {
            const BestLogits& best = best_of(thread, i);
            is_broken |= std::any_of(best.broken, best.broken + 8, [](int32_t lane) { return lane != 0; });
            for (int column = 0; column < kPanel; ++column) {
                const int candidate = best.panels[column] * kPanel + column;
                const float value = best.values[column];
                if (value > most || (value == most && candidate < id && value > -INFINITY)) {
                    most = value;
                    id = candidate;
                }
            }
        }
        step_.best_ids[i] = id;
        step_.best_logits[i] = is_broken ? NAN : most;
    }
}

}  // namespace fp
