// The parts of sampling that go row by row on few entries: edits, selections, draws. Compiled once, with the baseline's
// instructions, so these bits are the same at every level.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "sampling.h"

namespace octavo {

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();
// Fewer entries are sorted; more are told apart by a digit of their key first.
constexpr int64_t kSorted = 256;
constexpr int kDigits = 3;
constexpr int kShift[kDigits] = {21, 10, 0};
constexpr uint32_t kBins[kDigits] = {1u << 11, 1u << 11, 1u << 10};

void penalize(const SampleRow& row, float* x) {
    for (int64_t i = 0; i < row.seen_ids.size; ++i) {
        float& logit = x[row.seen_ids.data[i]];
        const float count = row.seen_counts.data[i];
        if (row.repetition != 1.0f) logit = std::min(logit < 0 ? logit * row.repetition : logit / row.repetition, kMost);
        logit -= count * row.frequency + (count > 0 ? row.presence : 0.0f);
    }
}

}  // namespace

double uniform(uint64_t seed, uint64_t choice, uint64_t position) {
    uint32_t c[4] = {uint32_t(position), uint32_t(position >> 32), uint32_t(choice), 0};
    uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(c[0]) * 0xD2511F53u, b = uint64_t(c[2]) * 0xCD9E8D57u;
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
        std::memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return double(uint64_t(c[0] >> 5) << 26 | c[1] >> 6) * 0x1p-53;
}

double natural_log(double x) {
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < 0.70710678118654752) {
        m *= 2;
        --exponent;
    }
    // log m = 2 artanh((m - 1) / (m + 1)), |argument| < 0.172
    const double s = (m - 1) / (m + 1), square = s * s;
    double series = 0;
    for (int k = 21; k >= 1; k -= 2) series = series * square + 1.0 / k;
    return double(exponent) * 0.69314718055994531 + 2 * s * series;
}

int64_t edit_row(const SampleRow& row, float* x, int64_t width, bool ban) {
    for (int64_t i = 0; i < row.bias_ids.size; ++i) x[row.bias_ids.data[i]] += row.bias_values.data[i];
    penalize(row, x);
    if (ban)
        for (int64_t i = 0; i < row.banned_ids.size; ++i) x[row.banned_ids.data[i]] = -kInf;
    if (!row.allowed_ids.size) return width;
    for (int64_t i = 0; i < row.allowed_ids.size; ++i) x[i] = x[row.allowed_ids.data[i]];  // ascending: never overtaken
    return row.allowed_ids.size;
}

void Largest::offer(float value, uint32_t index) {
    if (!takes(value)) return;
    if (int64_t(values.size()) == count_) {
        values.pop_back();
        indices.pop_back();
    }
    const auto place = std::upper_bound(values.begin(), values.end(), value, std::greater<float>()) - values.begin();
    values.insert(values.begin() + place, value);
    indices.insert(indices.begin() + place, index);
}

double Candidates::mass() const {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += double(weight[i]);
    return sum;
}

double Candidates::moment() const {
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += double(weight[i]) * double(std::max(z[i], -kMost));
    return sum;
}

uint32_t descending_key(float value) {
    value += 0.0f;  // -0.0 + 0.0 is 0.0
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

void keep_prefix(Candidates& candidates, uint32_t* key, uint32_t* rest, bool weighted, double goal) {
    const auto weight = [&](int64_t i) { return weighted ? double(candidates.weight[i]) : 1.0; };
    int64_t left = candidates.size;
    for (int64_t i = 0; i < left; ++i) rest[i] = uint32_t(i);
    // Entries that are surely kept hold `held`; the last of the list is among rest[0 .. left).
    double held = 0;
    int digit = 0;
    for (; digit < kDigits && left > kSorted; ++digit) {
        double mass[1u << 11] = {};
        uint32_t count[1u << 11] = {};
        const auto bin_of = [&](int64_t i) { return key[i] >> kShift[digit] & (kBins[digit] - 1); };
        for (int64_t j = 0; j < left; ++j) {
            const uint32_t bin = bin_of(rest[j]);
            mass[bin] += weight(rest[j]);
            ++count[bin];
        }
        uint32_t bin = 0;  // the bin that reaches the goal; the last one where roundings keep the sum below it
        double after = held;
        for (uint32_t b = 0; b < kBins[digit]; ++b) {
            if (!count[b]) continue;
            held = after;
            after += mass[b];
            bin = b;
            if (after >= goal) break;
        }
        left = std::copy_if(rest, rest + left, rest, [&](uint32_t i) { return bin_of(i) == bin; }) - rest;
    }
    if (digit < kDigits)  // else all keys left are equal, and in order of index
        std::sort(rest, rest + left, [&](uint32_t a, uint32_t b) { return key[a] != key[b] ? key[a] < key[b] : a < b; });
    uint32_t last = rest[left - 1];
    for (int64_t j = 0; j < left; ++j) {
        held += weight(rest[j]);
        if (held >= goal) {
            last = rest[j];
            break;
        }
    }
    const uint32_t last_key = key[last];
    candidates.filter([&](int64_t i) { return key[i] < last_key || (key[i] == last_key && i <= int64_t(last)); });
}

int64_t draw(const Candidates& candidates, double random) {
    const double goal = random * candidates.mass();
    double held = 0;
    int64_t positive = candidates.size - 1;  // only when all are 0, which no filter leaves
    for (int64_t i = 0; i < candidates.size; ++i) {
        held += double(candidates.weight[i]);
        if (held > goal) return i;
        if (candidates.weight[i] > 0) positive = i;
    }
    return positive;
}

}  // namespace octavo
