// Python's view of sampling: the settings of all rows as three tables, their lists of ids as one tuple a row.
#include <cmath>
#include <limits>

#include "arrays.h"
#include "bindings.h"
#include "sampling.h"

namespace octavo {

namespace {

using Ids = Array1<const int64_t>;
using Values = Array1<const float>;

// Columns of the tables, which octavo/sampling/native.py fills.
enum Real { kTemperature, kTopP, kMinP, kTypicalP, kRepetition, kPresence, kFrequency, kReals };
enum Whole { kTopK, kGreedy, kLogprobs, kProcessed, kWholes };
enum Key { kSeed, kChoice, kPosition, kKeys };

// The arrays of all rows, held while the GIL is released: nobody else may free them meanwhile.
struct Held {
    std::vector<Ids> ids;
    std::vector<Values> values;
};

template <typename A> A array_of(nb::handle object, const char* name) {
    A array;
    if (!nb::try_cast<A>(object, array, false)) throw nb::type_error((std::string(name) + " must be a vector of " + (std::is_same_v<A, Ids> ? "int64" : "float32")).c_str());
    return array;
}

Vector<const int64_t> ids_of(nb::handle object, const char* name, int64_t vocab, Held& held) {
    if (object.is_none()) return {nullptr, 0};
    held.ids.push_back(array_of<Ids>(object, name));
    const Vector<const int64_t> ids = vector(held.ids.back(), name);
    for (int64_t i = 0; i < ids.size; ++i)
        if (ids.data[i] < 0 || ids.data[i] >= vocab)
            throw nb::index_error((std::string(name) + ": token " + std::to_string(ids.data[i]) + " is outside the vocabulary of " + std::to_string(vocab)).c_str());
    return ids;
}

Vector<const float> values_of(nb::handle object, const char* name, int64_t size, Held& held) {
    if (object.is_none() && size == 0) return {nullptr, 0};
    held.values.push_back(array_of<Values>(object, name));
    const Vector<const float> values = vector(held.values.back(), name);
    if (values.size != size) refuse(name, "must have one value per id");
    for (int64_t i = 0; i < size; ++i)
        if (!std::isfinite(values.data[i])) refuse(name, "must be finite");
    return values;
}

// (bias_ids, bias_values, seen_ids, seen_counts, banned_ids, allowed_ids), each an array or None.
void add_edits(SampleRow& row, nb::handle edits, int64_t vocab, Held& held) {
    if (edits.is_none()) return;
    nb::tuple parts;
    if (!nb::try_cast<nb::tuple>(edits, parts, false) || parts.size() != 6) throw nb::type_error("edits must be None or a tuple of six for each row");
    row.bias_ids = ids_of(parts[0], "bias_ids", vocab, held);
    row.bias_values = values_of(parts[1], "bias_values", row.bias_ids.size, held);
    row.seen_ids = ids_of(parts[2], "seen_ids", vocab, held);
    row.seen_counts = values_of(parts[3], "seen_counts", row.seen_ids.size, held);
    row.banned_ids = ids_of(parts[4], "banned_ids", vocab, held);
    row.allowed_ids = ids_of(parts[5], "allowed_ids", vocab, held);
    if (!nb::handle(parts[5]).is_none() && row.allowed_ids.size == 0) refuse("allowed_ids", "must not be empty");
    for (int64_t i = 1; i < row.allowed_ids.size; ++i)
        if (row.allowed_ids.data[i] <= row.allowed_ids.data[i - 1]) refuse("allowed_ids", "must ascend, each id once");
}

float between(double value, double low, double high, const char* name) {
    if (!(value >= low && value <= high)) refuse(name, "is outside its range");
    return float(value);
}

SampleRow settings_of(const double* real, const int64_t* whole, const uint64_t* key) {
    constexpr double most = std::numeric_limits<float>::max();
    SampleRow row{};
    row.forced = -1;
    row.greedy = whole[kGreedy] != 0;
    // Zero means greedy; a divisor below what float32 can hold would be zero.
    row.temperature = row.greedy ? 1.0f : between(real[kTemperature], 1e-30, most, "temperature");
    between(real[kTopP], 0, 1, "top_p"), row.top_p = real[kTopP];
    row.min_p = between(real[kMinP], 0, 1, "min_p");
    between(real[kTypicalP], 0, 1, "typical_p"), row.typical_p = real[kTypicalP];
    row.repetition = between(real[kRepetition], 1e-30, 1e30, "repetition_penalty");
    row.presence = between(real[kPresence], -1e6, 1e6, "presence_penalty");
    row.frequency = between(real[kFrequency], -1e6, 1e6, "frequency_penalty");
    row.top_k = whole[kTopK];
    row.logprobs = whole[kLogprobs];
    row.processed = whole[kProcessed] != 0;
    if (row.top_k < 0) refuse("top_k", "must not be negative");
    if (row.logprobs < -1) refuse("logprobs", "must be -1 or more");
    row.seed = key[kSeed], row.choice = key[kChoice], row.position = key[kPosition];
    return row;
}

LogprobsOut logprobs_out(const Array2<int32_t>& ids, const Array2<double>& values, const Array2<int64_t>& ranks, const Array1<int32_t>& counts) {
    return {matrix(ids, "ids"), matrix(values, "values"), matrix(ranks, "ranks"), vector(counts, "counts")};
}

void sample(Context& context, const Array2<const float>& logits, const Array2<const double>& reals, const Array2<const int64_t>& wholes,
            const Array2<const uint64_t>& keys, const nb::list& edits, const Array1<int32_t>& tokens, const Array2<int32_t>& ids,
            const Array2<double>& values, const Array2<int64_t>& ranks, const Array1<int32_t>& counts) {
    const In from = matrix(logits, "logits");
    const auto real = matrix(reals, "reals");
    const auto whole = matrix(wholes, "wholes");
    const auto key = matrix(keys, "keys");
    if (real.cols != kReals || whole.cols != kWholes || key.cols != kKeys) refuse("settings", "have another number of columns");
    for (const int64_t rows : {real.rows, whole.rows, key.rows, int64_t(edits.size())})
        if (rows != from.rows) refuse("settings", "must have one row per row of logits");
    Held held;
    std::vector<SampleRow> rows;
    for (int64_t r = 0; r < from.rows; ++r) {
        rows.push_back(settings_of(real.data + r * real.stride, whole.data + r * whole.stride, key.data + r * key.stride));
        add_edits(rows.back(), edits[size_t(r)], from.cols, held);
    }
    const Vector<int32_t> to = vector(tokens, "tokens");
    const LogprobsOut out = logprobs_out(ids, values, ranks, counts);
    const nb::gil_scoped_release nogil;
    context.sample(from, rows, to, out);
}

// Raw logprobs of given tokens, with the `logprobs` most probable ones.
void logprobs(Context& context, const Array2<const float>& logits, const Array1<const int64_t>& targets, int64_t logprobs,
              const Array2<int32_t>& ids, const Array2<double>& values, const Array2<int64_t>& ranks, const Array1<int32_t>& counts) {
    const In from = matrix(logits, "logits");
    const auto wanted = vector(targets, "targets");
    if (wanted.size != from.rows) refuse("targets", "must have one id per row of logits");
    if (logprobs < 0) refuse("logprobs", "must not be negative");
    SampleRow row{};
    row.logprobs = logprobs;
    std::vector<SampleRow> rows(size_t(from.rows), row);
    for (int64_t r = 0; r < from.rows; ++r) {
        if (wanted.data[r] < 0 || wanted.data[r] >= from.cols) throw nb::index_error("targets: a token is outside the vocabulary");
        rows[size_t(r)].forced = wanted.data[r];
    }
    const LogprobsOut out = logprobs_out(ids, values, ranks, counts);
    const nb::gil_scoped_release nogil;
    std::vector<int32_t> tokens(size_t(from.rows));
    context.sample(from, rows, {tokens.data(), from.rows}, out);
}

}  // namespace

void bind_sampling(nb::class_<Context>& context) {
    context.def("sample", &sample, nb::arg("logits").noconvert(), nb::arg("reals").noconvert(), nb::arg("wholes").noconvert(),
                nb::arg("keys").noconvert(), nb::arg("edits"), nb::arg("tokens").noconvert(), nb::arg("ids").noconvert(),
                nb::arg("values").noconvert(), nb::arg("ranks").noconvert(), nb::arg("counts").noconvert());
    context.def("logprobs", &logprobs, nb::arg("logits").noconvert(), nb::arg("targets").noconvert(), nb::arg("logprobs"),
                nb::arg("ids").noconvert(), nb::arg("values").noconvert(), nb::arg("ranks").noconvert(), nb::arg("counts").noconvert());
}

}  // namespace octavo
