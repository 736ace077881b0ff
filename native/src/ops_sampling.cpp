// From rows of logits to tokens and logprobs, all rows of a step in one call.
//
// Passes over whole rows are divided into pieces of a fixed number of columns, so that few rows occupy many threads; what
// they leave is one value a block of columns, whoever computed it, and everything after that is done row by row in order.
// So a row's outcome depends on that row alone. Rows are worked on in groups, which bounds the scratch memory.
#include <algorithm>
#include <cmath>
#include <limits>

#include "sampling.h"

namespace octavo {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr int64_t kPiece = 32 * kLogitsBlock;
// Logits of a group: 4 MiB of them.
constexpr int64_t kGroupLogits = int64_t(1) << 20;
// Reported for a probability of 0: LOGPROB_FLOOR of sampling/logprobs.py.
constexpr double kFloor = -9999.0;
// A float32 exp is 0 below: such a token cannot be drawn, and is not reported.
constexpr float kZeroWeight = -103.972f;

// One row while it is worked on. Pointers lead into the scratch memory, each [V] or [blocks of V].
struct Work {
    const SampleRow* row;
    const float* raw;
    int64_t vocab;
    float *copy, *z, *weight;
    uint32_t *index, *key, *rest;
    float *raw_maxima, *edited_maxima, *sums, *moments, *raw_sums;
    int64_t* found;  // [pieces] entries collected there
    uint8_t* spoilt; // [pieces] a NaN there

    const float* x;  // what is drawn from: the raw row, or its edited copy
    const float* maxima;
    int64_t width;
    float raw_max, max;
    bool alive, drawing, needs_sums, needs_moments, needs_raw_sums, needs_list;
    double total, mean;  // of the weights of the whole row
    float limit;         // candidates have logits at least this large
    int64_t chosen;      // index into x, -1: not yet

    int64_t id_of(int64_t i) const { return row->allowed_ids.size && x == copy ? row->allowed_ids.data[i] : i; }
    bool top_k() const { return row->top_k > 0 && row->top_k < width; }
};

int64_t blocks_of(int64_t columns) { return (columns + kLogitsBlock - 1) / kLogitsBlock; }

float largest_of(const float* values, int64_t count) { return *std::max_element(values, values + count); }

double sum_of(const float* values, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += double(values[i]);
    return sum;
}

float scaled(const Work& w, float x) {
    const float z = x - w.max;
    return w.row->temperature != 1.0f ? z / w.row->temperature : z;
}

// A logit below every one whose z, by any roundings, is at least `z`.
float logit_limit(const Work& w, double z) {
    const double limit = double(w.max) + double(w.row->temperature) * (z * (1 + 1e-6) - 1e-6);
    return limit <= -double(kMost) ? -kMost : std::nextafter(float(limit), -kInf);
}

void begin(Work& w, int64_t pieces) {
    const SampleRow& row = *w.row;
    w.raw_max = largest_of(w.raw_maxima, blocks_of(w.vocab));
    w.alive = std::find(w.spoilt, w.spoilt + pieces, 1) == w.spoilt + pieces && std::fabs(w.raw_max) < kInf;
    w.x = w.raw;
    w.maxima = w.raw_maxima;
    w.width = w.vocab;
    w.drawing = w.needs_sums = w.needs_moments = w.needs_list = false;
    w.needs_raw_sums = w.alive && row.logprobs >= 0 && !row.processed;
    w.chosen = row.forced;
    if (!w.alive || !row.edited()) return;
    w.width = edit_row(row, w.copy, w.vocab, true);
    w.x = w.copy;
    w.maxima = w.edited_maxima;
}

// Bans give way when they would leave nothing; where the model itself left nothing, all are equal.
void give_way(Work& w, const SamplingKernels& kernels) {
    std::copy_n(w.raw, w.vocab, w.copy);
    w.width = edit_row(*w.row, w.copy, w.vocab, false);
    kernels.max_blocks(w.copy, w.width, w.edited_maxima);
    w.max = largest_of(w.maxima, blocks_of(w.width));
    if (w.max > -kInf) return;
    std::fill_n(w.copy, w.width, 0.0f);
    std::fill_n(w.edited_maxima, blocks_of(w.width), 0.0f);
    w.max = 0.0f;
}

// The k-th largest of the blocks' maxima: at least k logits reach it. Slack for what rounds to the same z.
float kth_limit(const Work& w, int64_t k) {
    const int64_t blocks = blocks_of(w.width);
    if (k > blocks) return -kInf;
    std::copy_n(w.maxima, blocks, w.sums);
    std::nth_element(w.sums, w.sums + k - 1, w.sums + blocks, std::greater<float>());
    const float kth = w.sums[k - 1];
    return kth > -kInf ? logit_limit(w, double(scaled(w, kth))) : -kInf;
}

// Greedy rows are finished here; of the others, what has to be known of the whole row.
void plan(Work& w, const SamplingKernels& kernels) {
    const SampleRow& row = *w.row;
    if (!w.alive || row.forced >= 0) return;
    w.max = w.x == w.raw ? w.raw_max : largest_of(w.maxima, blocks_of(w.width));
    if (w.max == -kInf) give_way(w, kernels);
    if (row.greedy) {
        const int64_t block = std::find(w.maxima, w.maxima + blocks_of(w.width), w.max) - w.maxima;
        w.chosen = std::find(w.x + block * kLogitsBlock, w.x + w.width, w.max) - w.x;
        return;
    }
    w.drawing = true;
    const bool whole = !w.top_k();
    w.needs_list = w.top_k() || row.top_p < 1 || row.min_p > 0 || row.typical_p < 1 || (row.logprobs >= 0 && row.processed);
    w.needs_sums = whole && (row.top_p < 1 || row.min_p <= 0);
    w.needs_moments = whole && row.top_p >= 1 && row.min_p <= 0 && row.typical_p < 1;
    w.limit = w.top_k() ? kth_limit(w, row.top_k) : row.min_p > 0 ? logit_limit(w, natural_log(double(row.min_p))) : -kMost;
}

// Tokens lighter than (1 - p) / V of the mass hold less than 1 - p of it together: the others hold the share p.
double share_bound(const Work& w, double p) {
    const double weight = (1 - p) * w.total / double(w.width) * 0.999;
    return weight > 0 ? natural_log(weight) : -double(kMost);
}

void bound(Work& w) {
    const SampleRow& row = *w.row;
    if (!w.needs_sums) return;
    w.total = sum_of(w.sums, blocks_of(w.width));
    if (row.top_p < 1) w.limit = logit_limit(w, share_bound(w, row.top_p));
    if (!w.needs_moments) return;
    w.mean = sum_of(w.moments, blocks_of(w.width)) / w.total;
    // All within a distance of the mean that takes in the maximum and the bound: what they leave out is not needed.
    w.limit = logit_limit(w, std::min(share_bound(w, row.typical_p), 2 * w.mean));
}

Candidates listed(Work& w, int64_t pieces) {
    Candidates list{w.index, w.z, w.weight, 0};
    for (int64_t p = 0; p < pieces && p * kPiece < w.width; ++p) {
        std::copy_n(w.index + p * kPiece, w.found[p], w.index + list.size);
        list.size += w.found[p];
    }
    for (int64_t i = 0; i < list.size; ++i) list.z[i] = scaled(w, w.x[list.index[i]]);
    return list;
}

// The filters in their order, each on the outcome of the one before.
void filter(Work& w, Candidates& list, const SamplingKernels& kernels) {
    const SampleRow& row = *w.row;
    const auto by_z = [&] { for (int64_t i = 0; i < list.size; ++i) w.key[i] = descending_key(list.z[i]); };
    if (w.top_k()) {
        by_z();
        keep_prefix(list, w.key, w.rest, false, double(row.top_k));
    }
    kernels.exp_list(list.z, list.size, list.weight);
    if (row.top_p < 1) {
        by_z();
        keep_prefix(list, w.key, w.rest, true, row.top_p * (w.needs_sums ? w.total : list.mass()));
    }
    if (row.min_p > 0) {
        const float least = row.min_p * largest_of(list.weight, list.size);
        list.filter([&](int64_t i) { return list.weight[i] >= least; });
    }
    if (row.typical_p < 1) {
        const double mass = w.needs_moments ? w.total : list.mass();
        const float mean = float(w.needs_moments ? w.mean : list.moment() / mass);
        for (int64_t i = 0; i < list.size; ++i) w.key[i] = descending_key(-std::fabs(list.z[i] - mean));
        keep_prefix(list, w.key, w.rest, true, row.typical_p * mass);
    }
}

// The draw from a whole row, by the sums of its blocks and then inside one block.
int64_t draw_whole(const Work& w, double random, const SamplingKernels& kernels) {
    const int64_t blocks = blocks_of(w.width);
    const double goal = random * w.total;
    double held = 0;
    int64_t block = 0, positive = 0;
    for (; block < blocks; ++block) {
        if (held + double(w.sums[block]) > goal) break;
        if (w.sums[block] > 0) positive = block;
        held += double(w.sums[block]);
    }
    if (block == blocks) block = positive;  // only when rounding took the goal up to the total
    const int64_t first = block * kLogitsBlock, size = std::min(kLogitsBlock, w.width - first);
    float z[kLogitsBlock] = {}, weights[kLogitsBlock];
    for (int64_t i = 0; i < size; ++i) z[i] = scaled(w, w.x[first + i]);
    kernels.exp_list(z, size, weights);
    double inside = 0;
    int64_t last = 0;
    for (int64_t i = 0; i < size; ++i) {
        inside += double(weights[i]);
        if (inside > goal - held) return first + i;
        if (weights[i] > 0) last = i;
    }
    return first + last;  // the two ways of summing the block differ by a rounding
}

// Entries of one row's report, the chosen token first.
class Report {
public:
    Report(const LogprobsOut& out, int64_t row) : out_(out), row_(row) {}
    void add(int64_t token, double value, int64_t rank) {
        const int64_t i = out_.counts.data[row_]++;
        out_.ids.data[row_ * out_.ids.stride + i] = int32_t(token);
        out_.values.data[row_ * out_.values.stride + i] = std::max(value, kFloor);
        out_.ranks.data[row_ * out_.ranks.stride + i] = rank;
    }

private:
    const LogprobsOut& out_;
    int64_t row_;
};

void report_raw(const Work& w, const SamplingKernels& kernels, Report report) {
    Largest top(w.row->logprobs);
    for (int64_t start = 0, block = 0; start < w.vocab; start += kLogitsBlock, ++block) {
        if (!top.takes(w.raw_maxima[block])) continue;
        const int64_t end = std::min(start + kLogitsBlock, w.vocab);
        for (int64_t i = start; i < end; ++i) top.offer(w.raw[i], uint32_t(i));
    }
    const double base = double(w.raw_max) + natural_log(sum_of(w.raw_sums, blocks_of(w.vocab)));
    const int64_t token = w.id_of(w.chosen);
    const auto place = std::find(top.indices.begin(), top.indices.end(), uint32_t(token)) - top.indices.begin();
    int64_t rank = place + 1;
    if (place == int64_t(top.indices.size())) {
        const float value = w.raw[token];
        rank = 1 + kernels.count_at_least(w.raw, token, value) +
               kernels.count_at_least(w.raw + token, w.vocab - token, std::nextafter(value, kInf));
    }
    report.add(token, double(w.raw[token]) - base, rank);
    for (size_t i = 0; i < top.indices.size(); ++i)
        if (int64_t(top.indices[i]) != token) report.add(top.indices[i], double(top.values[i]) - base, int64_t(i) + 1);
}

void report_processed(const Work& w, const Candidates& list, int64_t drawn, Report report) {
    const auto id_of = [&](int64_t i) { return w.id_of(list.index[i]); };
    Largest top(w.row->logprobs);
    int64_t rank = 1;
    for (int64_t i = 0; i < list.size; ++i) {
        top.offer(list.z[i], uint32_t(i));
        rank += list.z[i] > list.z[drawn] || (i < drawn && list.z[i] == list.z[drawn]);
    }
    const double base = natural_log(list.mass());
    report.add(id_of(drawn), double(list.z[drawn]) - base, rank);
    for (size_t i = 0; i < top.indices.size(); ++i)
        if (int64_t(top.indices[i]) != drawn && top.values[i] > kZeroWeight) report.add(id_of(top.indices[i]), double(top.values[i]) - base, int64_t(i) + 1);
}

int32_t finish(Work& w, int64_t pieces, const SamplingKernels& kernels, Report report) {
    if (!w.alive) return kNoToken;
    const SampleRow& row = *w.row;
    Candidates list{};
    int64_t drawn = -1;
    if (w.drawing) {
        const double random = uniform(row.seed, row.choice, row.position);
        if (w.needs_list) {
            list = listed(w, pieces);
            filter(w, list, kernels);
        }
        if (w.top_k() || row.top_p < 1 || row.min_p > 0 || row.typical_p < 1) {
            drawn = draw(list, random);
            w.chosen = list.index[drawn];
        } else {
            w.chosen = draw_whole(w, random, kernels);
            if (w.needs_list) drawn = std::lower_bound(list.index, list.index + list.size, uint32_t(w.chosen)) - list.index;
        }
    }
    if (row.logprobs >= 0 && !row.processed) report_raw(w, kernels, report);
    else if (row.logprobs >= 0 && w.drawing) report_processed(w, list, drawn, report);
    else if (row.logprobs >= 0) report.add(w.id_of(w.chosen), 0.0, 1);  // greedy: drawn with certainty
    return int32_t(w.id_of(w.chosen));
}

// Cuts one row's arrays out of `memory`; with none, only counts the bytes.
struct Cutter {
    uint8_t* memory;
    int64_t bytes = 0;
    template <typename T> void operator()(T*& pointer, int64_t count) {
        if (memory) pointer = reinterpret_cast<T*>(memory + bytes);
        bytes += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    }
};

int64_t cut(Work& w, uint8_t* memory, int64_t vocab, int64_t pieces) {
    Cutter cutter{memory};
    for (float** array : {&w.copy, &w.z, &w.weight}) cutter(*array, vocab);
    for (uint32_t** array : {&w.index, &w.key, &w.rest}) cutter(*array, vocab);
    for (float** array : {&w.raw_maxima, &w.edited_maxima, &w.sums, &w.moments, &w.raw_sums}) cutter(*array, blocks_of(vocab));
    cutter(w.found, pieces);
    cutter(w.spoilt, pieces);
    return cutter.bytes;
}

void check(In logits, const std::vector<SampleRow>& rows, Vector<int32_t> tokens, const LogprobsOut& out) {
    const int64_t count = int64_t(rows.size());
    require(logits.rows == count, "sample: as many rows of logits as of settings are needed");
    require(count == 0 || (logits.cols > 0 && logits.cols <= std::numeric_limits<int32_t>::max()), "sample: logits must have columns");
    require(tokens.size == count && out.counts.size == count, "sample: outputs must have one entry per row");
    int64_t most = 0;
    for (const SampleRow& row : rows)
        if (row.logprobs >= 0) most = std::max(most, std::min(row.logprobs, logits.cols) + 1);
    for (int64_t size : {out.ids.rows, out.values.rows, out.ranks.rows}) require(size == count, "sample: logprobs must have one row per row of logits");
    for (int64_t size : {out.ids.cols, out.values.cols, out.ranks.cols}) require(size >= most, "sample: logprobs have too few columns");
}

}  // namespace

void Context::sample(In logits, const std::vector<SampleRow>& rows, Vector<int32_t> tokens, const LogprobsOut& out) {
    check(logits, rows, tokens, out);
    if (rows.empty()) return;
    const std::lock_guard lock(mutex_);
    const SamplingKernels& k = kernels_.sampling;
    const int64_t vocab = logits.cols, pieces = (vocab + kPiece - 1) / kPiece;
    const int64_t group = std::min(logits.rows, std::max(int64_t(threads()), kGroupLogits / vocab));
    Work blank{};
    const int64_t bytes = cut(blank, nullptr, vocab, pieces);
    uint8_t* memory = scratch(checked_product(bytes, group, "sampling"));
    std::vector<Work> works{size_t(group), blank};
    for (int64_t i = 0; i < group; ++i) cut(works[size_t(i)], memory + i * bytes, vocab, pieces);

    for (int64_t first = 0; first < logits.rows; first += group) {
        const int64_t count = std::min(group, logits.rows - first);
        const auto each_row = [&](const auto& function) { pool_.run(count, [&](int64_t r) { function(works[size_t(r)], r); }); };
        const auto each_piece = [&](bool needed, const auto& function) {
            if (!needed) return;
            pool_.run(count * pieces, [&](int64_t item) {
                const int64_t piece = item % pieces, start = piece * kPiece;
                function(works[size_t(item / pieces)], piece, start, start / kLogitsBlock);
            });
        };
        const auto any = [&](const auto& wanted) { return std::any_of(works.begin(), works.begin() + count, wanted); };
        const auto length = [](int64_t width, int64_t start) { return std::min(kPiece, width - start); };
        for (int64_t r = 0; r < count; ++r) {
            works[size_t(r)].row = &rows[size_t(first + r)];
            works[size_t(r)].raw = logits.data + (first + r) * logits.stride;
            works[size_t(r)].vocab = vocab;
            out.counts.data[first + r] = 0;
        }
        each_piece(true, [&](Work& w, int64_t piece, int64_t start, int64_t block) {
            w.spoilt[piece] = k.max_blocks(w.raw + start, length(vocab, start), w.raw_maxima + block);
            if (w.row->edited()) std::copy_n(w.raw + start, length(vocab, start), w.copy + start);
        });
        each_row([&](Work& w, int64_t) { begin(w, pieces); });
        each_piece(any([](const Work& w) { return w.alive && w.x == w.copy; }), [&](Work& w, int64_t, int64_t start, int64_t block) {
            if (w.alive && w.x == w.copy && start < w.width) k.max_blocks(w.x + start, length(w.width, start), w.edited_maxima + block);
        });
        each_row([&](Work& w, int64_t) { plan(w, k); });
        each_piece(any([](const Work& w) { return w.needs_sums || w.needs_raw_sums; }), [&](Work& w, int64_t, int64_t start, int64_t block) {
            if (w.needs_sums && start < w.width) k.exp_blocks(w.x + start, length(w.width, start), w.max, w.row->temperature, w.sums + block);
            if (w.needs_moments && start < w.width) k.moment_blocks(w.x + start, length(w.width, start), w.max, w.row->temperature, w.moments + block);
            if (w.needs_raw_sums) k.exp_blocks(w.raw + start, length(vocab, start), w.raw_max, 1.0f, w.raw_sums + block);
        });
        for (int64_t r = 0; r < count; ++r) bound(works[size_t(r)]);
        each_piece(any([](const Work& w) { return w.needs_list; }), [&](Work& w, int64_t piece, int64_t start, int64_t block) {
            if (w.needs_list && start < w.width)
                w.found[piece] = k.collect(w.x + start, length(w.width, start), w.maxima + block, w.limit, uint32_t(start), w.index + start);
        });
        each_row([&](Work& w, int64_t r) { tokens.data[first + r] = finish(w, pieces, k, Report(out, first + r)); });
    }
}

}  // namespace octavo
