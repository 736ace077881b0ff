// Sampling of a step's rows of logits: what is asked of each row, and the parts of the work that go row by row.
// The definitions are those of src/octavo/sampling/processors.py and docs/sampling.md.
//
// Owner: nobody; rows are views of what the caller holds for the length of one call.
#pragma once
#include <vector>

#include "context.h"

namespace octavo {

constexpr int32_t kNoToken = -1;

// Settings of one row. Off: top_k 0, top_p 1, min_p 0, typical_p 1, repetition 1, presence and frequency 0.
struct SampleRow {
    float temperature, min_p;
    double top_p, typical_p;
    float repetition, presence, frequency;
    int64_t top_k;
    bool greedy;
    int64_t logprobs;  // -1: none; else how many of the most probable tokens
    bool processed;    // logprobs of the distribution drawn from, not of the logits
    uint64_t seed, choice, position;

    // Ids are inside the vocabulary; allowed ids ascend, and there is at least one where there are any.
    Vector<const int64_t> bias_ids, seen_ids, banned_ids, allowed_ids;
    Vector<const float> bias_values, seen_counts;

    int64_t forced = -1;  // a token to report on instead of drawing one

    bool edited() const { return forced < 0 && (bias_ids.size || seen_ids.size || banned_ids.size || allowed_ids.size); }
};

// Row r: counts[r] entries (0: none asked, or no token), the chosen token first.
struct LogprobsOut {
    Matrix<int32_t> ids;
    Matrix<double> values;
    Matrix<int64_t> ranks;
    Vector<int32_t> counts;
};

// Philox4x32-10 (Salmon et al. 2011) of (seed; position, choice, 0): a multiple of 2^-53 in [0, 1), as sampling/random.py.
double uniform(uint64_t seed, uint64_t choice, uint64_t position);

// log(x) of a positive finite x, within 1e-15 of it: the same bits whatever the C library.
double natural_log(double x);

// Bias, penalties and, if asked for, bans on a row x of `width` logits, then what the allowed ids leave, moved to the front.
// Returns how many logits are left.
int64_t edit_row(const SampleRow& row, float* x, int64_t width, bool ban);

// The `count` largest values, the lower index first among equals, of values offered in order of index.
class Largest {
public:
    explicit Largest(int64_t count) : count_(count) {}
    bool takes(float value) const { return int64_t(values.size()) < count_ || (count_ > 0 && value > values.back()); }
    void offer(float value, uint32_t index);

    std::vector<float> values;      // descending
    std::vector<uint32_t> indices;

private:
    int64_t count_;
};

// Tokens that may be drawn: indices into the row, ascending; z = (x - max) / temperature; weight = exp(z).
struct Candidates {
    uint32_t* index;
    float *z, *weight;
    int64_t size;

    double mass() const;    // sum of weights in order
    double moment() const;  // of weight * z
    // Keeps candidates[i] where keep(i), in order.
    template <typename F> void filter(const F& keep) {
        int64_t kept = 0;
        for (int64_t i = 0; i < size; ++i)
            if (keep(i)) {
                index[kept] = index[i];
                z[kept] = z[i];
                weight[kept++] = weight[i];
            }
        size = kept;
    }
};

// Smallest as an integer for the largest float; equal for equal floats, -0.0 and 0.0 among them.
uint32_t descending_key(float value);

// Keeps the shortest list of candidates, in order of (key, index), whose weights (1 each without `weighted`) sum to at
// least `goal`; at least one. key, rest: [size], overwritten. A radix selection: no sort beyond a few hundred entries.
void keep_prefix(Candidates& candidates, uint32_t* key, uint32_t* rest, bool weighted, double goal);

// Position of the first candidate whose cumulative weight exceeds `random` times all; never one of weight 0.
int64_t draw(const Candidates& candidates, double random);

}  // namespace octavo
