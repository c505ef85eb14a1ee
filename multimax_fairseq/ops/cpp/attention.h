// Attention with modulated scores, softmax(factor sigma(scale Q K^T) + mask) V, and its gradients;
// row_attention.h has that of row functions.
#pragma once

#include "dropout.h"
#include "modulator.h"
#include "vectors.h"
#include "windows.h"

struct Tensor4 {  // (batch, heads, length, size); the last dimension is dense
  float* data;
  int64_t batch, head, row;  // strides
  float* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Attention {
  int64_t batch, heads, queries, keys, size, threads;
  int64_t columns;             // of the parameters; 0: no modulator
  int64_t head_stride;         // the stride between the rows of two heads; 0: one row for all
  int64_t is_causal;           // 1: query t may attend to the keys s <= t only
  float scale, dropout;        // dropout: the probability of dropping
  uint64_t seed;
  int64_t function;  // of `dispatch_row`; softmax does not read it
  // (batch, queries). Query t of sentence b may attend to the keys [starts[b, t], ends[b, t]). The
  // windows include the causal mask. Null: only the causal mask, if any, restricts the keys.
  const int32_t *starts, *ends;
  const float* parameters;  // (1 or heads, columns)
  // With a modulator: factor * sigma. (batch, heads, queries); or null. In a decoding step:
  // (heads,), and log(keys) multiplies it.
  const float* factor;
  const float* sink;        // (heads,): the score of an extra entry without a key; or null
  const float* row_parameter;  // (heads,), as RowFunction.parameter in ops/row_function.py; or null
  // Softmax: (batch, heads, 2, queries), maximum score and 1 / sum of exp. A row function:
  // (batch, heads, 3, queries), its `Statistics`. Or null.
  float* statistics;
  float* grad_parameters;     // (1 or heads, columns), or null
  float* grad_factor;         // (batch, heads, queries), or null
  float* grad_sink;           // (heads,), or null
  float* grad_row_parameter;  // (heads,), or null
  Mask mask;                  // applied in addition to the windows
  Tensor4 query, key, value, output, grad_output, grad_query, grad_key, grad_value;
  // Beam search: hypotheses share their prefixes, so `key` and `value` hold the states of all
  // steps, (rows, heads, size). Key s of hypothesis b is row ancestors[b, s], with `ancestors`
  // (batch, keys). Null: `key` and `value` are (batch, heads, keys, size).
  const int64_t* ancestors;
  int64_t rows;

  template <class Sigma>
  Sigma sigma(int64_t h) const {
    return Sigma(parameters + h * head_stride);
  }
  const float* factors(int64_t b, int64_t h) const {
    return factor ? factor + (b * heads + h) * queries : nullptr;
  }
  float sink_of(int64_t h) const { return sink ? sink[h] : -INFINITE; }
};

namespace {

// Tiles of a block of queries fit in the L2 cache with KEYS_L2 keys, in the L1 cache with KEYS_L1.
constexpr int64_t KEYS_L2 = 512, KEYS_L1 = 64;
// The decoding kernel takes up to this number of queries, the tiled kernel takes more.
constexpr int64_t DECODE_QUERIES = 8;
// A thread processes neighbouring hypotheses together because they share keys.
constexpr int64_t HYPOTHESES = 16;
constexpr int64_t CACHE_LINE = 64 / sizeof(float);  // floats
// Prefetch a head only up to this number of floats: the L2 cache also holds the current tiles.
constexpr int64_t MAX_PREFETCH = 1 << 17;
constexpr int64_t NONE = -1;  // there is no next head

// Whether matrix products can read a head's rows without a copy. Rows with another stride may map
// to the same cache sets.
inline bool are_dense(const Tensor4& t, int64_t rows, int64_t size) {
  return t.row == size && rows % LANES == 0 && size % LANES == 0;
}

// Returns a head's rows as a dense matrix (padded(rows), padded(size)); copies them if needed.
const float* dense_rows(
    const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch) {
  if (are_dense(t, rows, size)) return t.at(b, h);
  if (rows % LANES || size % LANES) std::fill_n(scratch, padded(rows) * padded(size), 0.0f);
  copy(t.at(b, h), t.row, rows, size, scratch, padded(size));
  return scratch;
}

// Accumulates a head's gradient, (padded(rows), padded(size)): directly in the output tensor if
// that is dense, otherwise in scratch memory that write_back copies to the output.
struct GradRows {
  const int64_t rows, size, stride;
  float *const out, *const data;
  int64_t initialized = 0;  // the first `initialized` rows hold sums; the others are uninitialised
  GradRows(const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch)
      : rows(rows), size(size), stride(t.row), out(t.at(b, h)),
        data(are_dense(t, rows, size) ? out : scratch) {}
  // Sets the uninitialised rows before row `count` to 0.
  void initialize(int64_t count) {
    for (; initialized < count; initialized++)
      std::fill_n(data + initialized * padded(size), padded(size), 0.0f);
  }
  void write_back() {
    initialize(padded(rows));
    if (data != out) copy(data, padded(size), rows, size, out, stride);
  }
};

// The factor that normalises exp(score - top). It is 0 for a query that may attend to no key, and
// NaN for a sink of NaN or +inf. With a NaN score it is 0, but the output is NaN in any case.
inline float inverse_sum(float sum, float sink) {
  if (!(sink < INFINITE)) return std::numeric_limits<float>::quiet_NaN();
  return sum > 0 ? 1 / sum : 0;
}

// Prefetches the rows of a thread's next head, a few at a time, while the thread computes the
// current head. Otherwise the matrix products would wait for main memory.
class Prefetcher {
  struct Source {
    const float* data;
    int64_t stride, rows;
  };
  Source sources[7];
  int64_t count = 0, size, rows_per_call = 0, next_row = 0, end = 0;

 public:
  // `products`: the number of matrix products per tile of scores that call `advance`.
  Prefetcher(const Attention& a, int64_t next, int64_t products,
        std::initializer_list<const Tensor4*> of_queries,
        std::initializer_list<const Tensor4*> of_keys)
      : size(a.size) {
    const int64_t maximum = std::max(a.queries, a.keys);
    const int64_t tensors = of_queries.size() + of_keys.size();
    if (next == NONE || tensors * maximum * size > MAX_PREFETCH) return;
    const auto add = [&](const Tensor4* t, int64_t rows) {
      sources[count++] = {t->at(next / a.heads, next % a.heads), t->row, rows};
    };
    for (const Tensor4* t : of_queries) add(t, a.queries);
    for (const Tensor4* t : of_keys) add(t, a.keys);
    // Spread the rows over the tiles of causal attention: half of all tiles, plus the diagonal.
    const int64_t blocks = (a.queries + QUERIES - 1) / QUERIES;
    rows_per_call = 1 + (maximum - 1) / (products * (padded(a.keys) / LANES) * (blocks + 1) / 2);
    end = maximum;
  }
  void advance() {
    for (const int64_t stop = std::min(next_row + rows_per_call, end); next_row < stop; next_row++)
      for (const Source* source = sources; source < sources + count; source++)
        for (int64_t d = 0; next_row < source->rows && d < size; d += CACHE_LINE)
          __builtin_prefetch(source->data + next_row * source->stride + d, 0, 1);
  }
};

// The tiled kernel, with an online softmax over tiles of KEYS_L2 keys.
template <class Sigma, bool MASKED>
void forward_head(const Attention& a, int64_t b, int64_t h, int64_t next, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size, pitch = padded(size);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float *factors = a.factors(b, h), sink = a.sink_of(h);
  const Dropout dropout(a.dropout, a.seed, bh);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, pitch)
  float* rows = scratch + keys * pitch;
  const float* value = dense_rows(a.value, b, h, a.keys, size, rows);  // (keys, pitch)
  float* query = rows + keys * pitch;        // (size, QUERIES), scaled
  float* output = query + size * QUERIES;    // (QUERIES, pitch)
  float* scores = output + QUERIES * pitch;  // (KEYS_L2, QUERIES)
  float* mask = scores + KEYS_L2 * QUERIES;  // (KEYS_L2, QUERIES) if MASKED
  Prefetcher prefetcher(a, next, 1, {&a.query}, {&a.key, &a.value});

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a.starts, a.ends, a.queries, a.keys, a.is_causal, b, q0, count);
    if (count < width) std::fill(query, output, 0.0f);
    transpose(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, QUERIES,
              a.scale);
    alignas(64) float top[QUERIES], sum[QUERIES], shrink[QUERIES];
    std::fill(top, top + QUERIES, sink);
    std::fill(sum, sum + QUERIES, sink == -INFINITE ? 0.0f : 1.0f);
    const int64_t first = w.first / LANES * LANES;
    if (first >= w.last) std::fill(output, scores, 0.0f);
    for (int64_t s0 = first, s1; s0 < w.last; s0 = s1) {
      s1 = std::min(s0 + KEYS_L2, padded(w.last));
      w.for_each_key_group(s0, s1, [&](int64_t s, int64_t q) {
        prefetcher.advance();
        small_product(LANES, width - q, size, key + s * pitch, pitch, 1, query + q, QUERIES,
                      scores + (s - s0) * QUERIES + q, QUERIES, false);
      });
      if (MASKED) mask_tile(a.mask, a.keys, b, h, q0, count, s0, s1, mask);
      for (int64_t q = 0; q < width; q += LANES) {
        Vec maximum = load(top + q);
        const Vec outer = is_scaled<Sigma> ? load(factors + q0 + q, count - q) : Vec{};
        const int64_t stop = w.stop(q, s0, s1);
        for (int64_t s = s0; s < stop; s++) {
          float* at = scores + (s - s0) * QUERIES + q;
          Vec z = sigma.value(load(at));
          if (is_scaled<Sigma>) z = rounded(z * outer);
          if (MASKED) z = masked(z, load(mask + (at - scores)));
          if (s < w.common_first || s >= w.common_last)
            z = may_attend(w, q, s) ? z : broadcast(-INFINITE);
          store(at, z);
          maximum = vec_max(maximum, z);
        }
        const Vec old = load(top + q);
        store(top + q, maximum);
        maximum = exp_shift(maximum);
        Vec partials[4] = {};  // four partial sums reduce the rounding error
        for (int64_t s = s0; s < stop; s++) {
          float* at = scores + (s - s0) * QUERIES + q;
          const Vec p = exponential(load(at) - maximum);
          partials[s % 4] += p;
          store(at, a.dropout > 0 ? p * dropout.keep(dropout.key(s), q0 + q) : p);
        }
        const Vec factor = exponential(old - maximum);
        store(shrink + q, factor);
        store(sum + q, load(sum + q) * factor + (partials[0] + partials[1]) +
                           (partials[2] + partials[3]));
      }
      if (s0 > first)
        for (int64_t q = 0; q < width; q++)
          for (int64_t d = 0; d < pitch; d += LANES) {
            float* at = output + q * pitch + d;
            store(at, load(at) * shrink[q]);
          }
      for (int64_t s = s0; s < s1; s += KEYS_L1)
        for (int64_t q = 0; q < width; q += LANES) {
          const int64_t depth = w.stop(q, s, std::min(s + KEYS_L1, s1)) - s;
          if (depth || s == first)
            small_product(LANES, pitch, depth, scores + (s - s0) * QUERIES + q, 1, QUERIES,
                          value + s * pitch, pitch, output + q * pitch, pitch, s > first);
        }
    }
    float inverse[QUERIES];
    for (int64_t q = 0; q < count; q++) {
      inverse[q] = inverse_sum(sum[q], sink);
      if (!a.statistics) continue;
      // A query that may attend to no key gets the inverse 0 and a finite maximum.
      float* kept = a.statistics + 2 * bh * a.queries + q0 + q;
      kept[0] = sum[q] > 0 ? top[q] : 0, kept[a.queries] = inverse[q];
    }
    float* out = a.output.at(b, h) + q0 * a.output.row;
    for (int64_t q = 0; q < count; q++)
      copy(output + q * pitch, pitch, 1, size, out + q * a.output.row, a.output.row, inverse[q]);
  }
}

int64_t forward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys), pitch = padded(a.size), tiles = a.mask.data ? 2 : 1;
  return (2 * keys + QUERIES) * pitch + (a.size + tiles * KEYS_L2) * QUERIES;
}

// Returns key or value s of hypothesis or sentence b.
inline const float* source_row(
    const Attention& a, const Tensor4& t, int64_t b, int64_t h, int64_t s) {
  if (!a.ancestors) return t.at(b, h) + s * t.row;
  return t.at(0, h) + a.ancestors[b * a.keys + s] * t.row;
}

// The dot products of a query, (size,), and the keys s0 + lane; 0 for keys outside [first, last).
inline Vec dot_products(
    const Attention& a, int64_t b, int64_t h, int64_t s0, int64_t first, int64_t last,
    const float* query) {
  Vec products[LANES];
  for (int64_t s = s0; s < s0 + LANES; s++) {
    Vec sum{};
    if (s >= first && s < last) {
      const float* key = source_row(a, a.key, b, h, s);
      for (int64_t d = 0; d < a.size; d += LANES) sum += load(query + d) * load(key + d);
    }
    products[s - s0] = sum;
  }
  return lane_sums(products);
}

// Writes the sum of weights[s * stride] * factor * value s for s in [first, last) to `out`, (size,).
// SPARSE: skips weights of 0.
template <bool SPARSE>
void add_values(
    const Attention& a, int64_t b, int64_t h, int64_t first, int64_t last, const float* weights,
    int64_t stride, float factor, float* out) {
  const auto write = [&]<int vectors>(std::integral_constant<int, vectors>, int64_t d) {
    const auto add = [&](int64_t s, Vec* sums) {
      const float weight = weights[s * stride];
      if (SPARSE && weight == 0) return;
      const float* value = source_row(a, a.value, b, h, s) + d;
      for (int i = 0; i < vectors; i++) sums[i] += weight * load(value + i * LANES);
    };
    // Two independent sums hide the latency of the additions.
    Vec even[vectors] = {}, odd[vectors] = {};
    int64_t s = first;
    for (; s + 1 < last; s += 2) add(s, even), add(s + 1, odd);
    if (s < last) add(s, even);
    for (int i = 0; i < vectors; i++) store(out + d + i * LANES, (even[i] + odd[i]) * factor);
  };
  int64_t d = 0;
  for (; d + 4 * LANES <= a.size; d += 4 * LANES) write(std::integral_constant<int, 4>(), d);
  for (; d + 2 * LANES <= a.size; d += 2 * LANES) write(std::integral_constant<int, 2>(), d);
  if (d < a.size) write(std::integral_constant<int, 1>(), d);
}

// The decoding kernel, for too few queries to fill a tile. Reads keys and values in place.
template <class Sigma>
void decode_head(const Attention& a, int64_t b, int64_t h, int64_t, float* scratch) {
  const int64_t size = a.size, length = padded(a.keys);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float *factors = a.factors(b, h), sink = a.sink_of(h);
  for (int64_t t = 0; t < a.queries; t++) {
    const int64_t at = b * a.queries + t;
    const int64_t first = a.starts ? a.starts[at] : 0;
    const int64_t last = a.ends ? a.ends[at] : causal_end(t, a.keys, a.is_causal);
    const float* query = a.query.at(b, h) + t * a.query.row;
    float* out = a.output.at(b, h) + t * a.output.row;
    Vec maximum = broadcast(-INFINITE);
    for (int64_t s0 = 0; s0 < length; s0 += LANES) {
      const IntVec s = lane_indices(s0), may_attend = (s >= int32_t(first)) & (s < int32_t(last));
      const Vec score = a.scale * dot_products(a, b, h, s0, first, last, query);
      Vec z = sigma.value(score);
      if (is_scaled<Sigma>) z = rounded(z * factors[t]);
      z = may_attend ? z : broadcast(-INFINITE);
      store(scratch + s0, z);
      maximum = vec_max(maximum, z);
    }
    float top = sink;
    if (a.mask.data) {
      const int64_t row = mask_row(a.mask, b, h, t);
      for (int64_t s = first; s < last; s++) {
        const float mask = mask_at(a.mask, row, s);
        scratch[s] = mask == -INFINITE ? mask : scratch[s] + mask;
        top = std::max(top, scratch[s]);
      }
    } else {
      top = std::max(top, max_lane(maximum));
    }
    Vec sums{};
    for (int64_t s = 0; s < length; s += LANES) {
      const Vec p = exponential(load(scratch + s) - (top == -INFINITE ? 0 : top));
      store(scratch + s, p);
      sums += p;
    }
    const float rest = sink == -INFINITE ? 0 : std::exp(sink - top);
    const float inverse = inverse_sum(rest + sum_lanes(sums), sink);
    add_values<false>(a, b, h, first, last, scratch, 1, inverse, out);
  }
}

struct Backward : Attention {
  // Partial gradients: (batch, heads, COLUMNS) of the parameters, (batch, heads) of the others.
  double *parameter_sums, *sink_sums, *row_parameter_sums;
};

// A head in the backward pass: its keys and values, and memory for their gradients and for one block
// of queries. Functions copy the members to local variables, which stay in registers.
struct BackwardHead {
  int64_t keys, size, pitch;
  const float *key, *value;                // (keys, pitch)
  float *key_rows, *value_rows;            // (keys, pitch), for the gradients
  float *query, *grad_output, *grad_query;  // (QUERIES, pitch); query is scaled
  float *query_t, *grad_output_t;          // (size, QUERIES)
  float* rest;                             // unused scratch memory

  BackwardHead(const Attention& a, int64_t b, int64_t h, float* scratch)
      : keys(padded(a.keys)), size(a.size), pitch(padded(size)),
        key(dense_rows(a.key, b, h, a.keys, size, scratch)),
        value(dense_rows(a.value, b, h, a.keys, size, scratch + keys * pitch)),
        key_rows(scratch + 2 * keys * pitch), value_rows(scratch + 3 * keys * pitch),
        query(scratch + 4 * keys * pitch), grad_output(query + QUERIES * pitch),
        grad_query(grad_output + QUERIES * pitch), query_t(grad_query + QUERIES * pitch),
        grad_output_t(query_t + size * QUERIES), rest(grad_output_t + size * QUERIES) {}
  static int64_t floats(const Attention& a) {
    const int64_t pitch = padded(a.size);
    return (4 * padded(a.keys) + 3 * QUERIES) * pitch + 2 * a.size * QUERIES;
  }
  // Reads the block of queries [q0, q0 + count).
  void load_queries(const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t count) const {
    if (count % LANES || size < pitch) std::fill(query, rest, 0.0f);
    copy(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, pitch, a.scale);
    transpose(query, pitch, count, size, query_t, QUERIES);
    copy(a.grad_output.at(b, h) + q0 * a.grad_output.row, a.grad_output.row, count, size,
         grad_output, pitch);
    transpose(grad_output, pitch, count, size, grad_output_t, QUERIES);
  }
  void write_grad_query(
      const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t count) const {
    copy(grad_query, pitch, count, size, a.grad_query.at(b, h) + q0 * a.grad_query.row,
         a.grad_query.row, a.scale);
  }
};

// Recomputes the scores of a block of queries, then their gradients, in tiles of KEYS_L1 keys.
template <class Sigma, bool MASKED>
void backward_head(const Backward& a, int64_t b, int64_t h, int64_t next, float* scratch) {
  const int64_t bh = b * a.heads + h;
  const Sigma sigma = a.sigma<Sigma>(h);
  const float *factors = a.factors(b, h), sink = a.sink_of(h);
  const Dropout dropout(a.dropout, a.seed, bh);
  const BackwardHead head(a, b, h, scratch);
  const auto [keys, size, pitch, key, value, key_rows, value_rows, query, grad_output, grad_query,
              query_t, grad_output_t, rest] = head;
  GradRows grad_key(a.grad_key, b, h, a.keys, size, key_rows);
  GradRows grad_value(a.grad_value, b, h, a.keys, size, value_rows);
  float* scores = rest;                                // (keys, QUERIES); later their gradients
  float* probs = scores + keys * QUERIES;              // (keys, QUERIES)
  float* grad_probs = probs + keys * QUERIES;          // (keys, QUERIES)
  float* mask = grad_probs + keys * QUERIES;           // (KEYS_L1, QUERIES) if MASKED
  Prefetcher prefetcher(a, next, 4, {&a.query, &a.grad_output, &a.grad_query},
              {&a.key, &a.value, &a.grad_key, &a.grad_value});

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a.starts, a.ends, a.queries, a.keys, a.is_causal, b, q0, count);
    const int64_t first = w.first / LANES * LANES, last = padded(w.last);
    grad_key.initialize(first), grad_value.initialize(first);
    head.load_queries(a, b, h, q0, count);
    if (first >= last) std::fill(grad_query, query_t, 0.0f);
    alignas(64) float tops[QUERIES] = {}, inverses[QUERIES] = {}, means[QUERIES] = {};
    alignas(64) float grad_factors[QUERIES] = {};
    const float* statistics = a.statistics + 2 * bh * a.queries + q0;
    std::copy_n(statistics, count, tops);
    std::copy_n(statistics + a.queries, count, inverses);

    // First pass: the probabilities p and the mean of their gradients, sum(p * grad_probs). The
    // mean also equals sum(output * grad_output), but the output is rounded, and then the gradients
    // by the scores would not sum to 0.
    for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
      s1 = std::min(s0 + KEYS_L1, last);
      w.for_each_key_group(s0, s1, [&](int64_t s, int64_t q) {
        prefetcher.advance();
        small_product(LANES, width - q, size, key + s * pitch, pitch, 1, query_t + q, QUERIES,
                      scores + s * QUERIES + q, QUERIES, false);
      });
      w.for_each_key_group(s0, s1, [&](int64_t s, int64_t q) {
        prefetcher.advance();
        small_product(LANES, width - q, size, value + s * pitch, pitch, 1, grad_output_t + q,
                      QUERIES, grad_probs + s * QUERIES + q, QUERIES, false);
      });
      if (MASKED) mask_tile(a.mask, a.keys, b, h, q0, count, s0, s1, mask);
      for (int64_t q = 0; q < width; q += LANES) {
        const Vec top = load(tops + q), inverse = load(inverses + q);
        const Vec outer = is_scaled<Sigma> ? load(factors + q0 + q, count - q) : Vec{};
        Vec mean{};
        const int64_t stop = w.stop(q, s0, s1);
        for (int64_t s = s0; s < stop; s++) {
          const int64_t at = s * QUERIES + q;
          Vec z = sigma.value(load(scores + at));
          if (is_scaled<Sigma>) z = rounded(z * outer);
          if (MASKED) z = masked(z, load(mask + (s - s0) * QUERIES + q));
          Vec p = exponential(z - top) * inverse;
          if (s < w.common_first || s >= w.common_last) p = may_attend(w, q, s) ? p : Vec{};
          if (a.dropout > 0)
            store(grad_probs + at,
                  load(grad_probs + at) * dropout.keep(dropout.key(s), q0 + q));
          mean += p * load(grad_probs + at);
          store(probs + at, p);
        }
        for (int64_t s = stop; s < s1; s++) store(probs + s * QUERIES + q, Vec{});
        store(means + q, load(means + q) + mean);
      }
    }
    // The sink's value vector is 0, so its gradient is -p_sink * mean.
    if (a.grad_sink)
      for (int64_t q = 0; q < count; q++)
        a.sink_sums[bh] -= std::exp(sink - tops[q]) * inverses[q] * means[q];
    // Second pass: the gradients with respect to scores, parameters, values, keys and queries.
    for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
      s1 = std::min(s0 + KEYS_L1, last);
      Sums sums;
      for (int64_t q = 0; q < width; q += LANES) {
        const Vec mean = load(means + q);
        const Vec outer = is_scaled<Sigma> ? load(factors + q0 + q, count - q) : Vec{};
        Vec grad_factor{};
        const int64_t stop = w.stop(q, s0, s1);
        for (int64_t s = s0; s < stop; s++) {
          const int64_t at = s * QUERIES + q;
          const Vec p = load(probs + at), x = load(scores + at);
          Vec grad = p * (load(grad_probs + at) - mean);
          if (is_scaled<Sigma>) {
            grad_factor += p == 0 ? Vec{} : grad * sigma.value(x);
            grad *= outer;
          }
          store(scores + at, sigma.backward(x, grad, sums));
          if (a.dropout > 0) store(probs + at, p * dropout.keep(dropout.key(s), q0 + q));
        }
        if (is_scaled<Sigma>) store(grad_factors + q, load(grad_factors + q) + grad_factor);
        for (int64_t s = stop; s < s1; s++) store(scores + s * QUERIES + q, Vec{});
      }
      sigma.add_gradients(sums, a.parameter_sums + bh * COLUMNS);
      const auto add = [&](const GradRows& grad, const float* weights, const float* inputs) {
        w.for_each_key_group(s0, s1, [&](int64_t s, int64_t q) {
          prefetcher.advance();
          small_product(LANES, pitch, width - q, weights + s * QUERIES + q, QUERIES, 1,
                        inputs + q * pitch, pitch, grad.data + s * pitch, pitch,
                        s < grad.initialized);
        });
      };
      add(grad_value, probs, grad_output);
      add(grad_key, scores, query);
      for (int64_t q = 0; q < width; q += LANES)
        small_product(LANES, pitch, w.stop(q, s0, s1) - s0, scores + s0 * QUERIES + q, 1, QUERIES,
                      key + s0 * pitch, pitch, grad_query + q * pitch, pitch, s0 > first);
    }
    grad_key.initialized = grad_value.initialized = std::max(grad_key.initialized, last);
    head.write_grad_query(a, b, h, q0, count);
    if (a.grad_factor) std::copy_n(grad_factors, count, a.grad_factor + bh * a.queries + q0);
  }
  grad_key.write_back();
  grad_value.write_back();
}

int64_t backward_scratch(const Attention& a) {
  return BackwardHead::floats(a) +
         (3 * padded(a.keys) + (a.mask.data ? KEYS_L1 : 0)) * QUERIES;
}

// Calls work(piece, next piece of this thread or NONE, scratch) for each piece, in parallel. The
// scheduling is dynamic because sentences differ in length and cores may be busy. The result of a
// piece does not depend on its thread.
template <class Work>
void for_each_piece(int64_t count, int64_t threads, int64_t scratch_size, Work work) {
  threads = std::min(threads, count);
  // Allocate outside the parallel region: an exception inside it would terminate the process.
  const Buffer scratch(threads * padded(scratch_size));
  std::atomic<int64_t> first = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++)
    for (int64_t j = first++, next; j < count; j = next) {
      next = first++;
      work(j, next < count ? next : NONE, scratch + i * padded(scratch_size));
    }
}

template <class Kind, class Head>
void for_each_head(const Kind& a, int64_t scratch_size, Head head) {
  for_each_piece(
      a.batch * a.heads, a.threads, scratch_size, [&](int64_t j, int64_t next, float* scratch) {
        head(a, j / a.heads, j % a.heads, next, scratch);
      });
}

// Prefetches the keys and values of hypothesis b that it does not share with the previous
// hypothesis. They are scattered in memory: each stays where an earlier step wrote it.
void prefetch_hypothesis(const Attention& a, int64_t b) {
  const int64_t *own = a.ancestors + b * a.keys, *before = own - a.keys;
  for (int64_t s = 0; s < a.keys; s++) {
    if (own[s] == before[s]) continue;
    const float *key = source_row(a, a.key, b, 0, s), *value = source_row(a, a.value, b, 0, s);
    for (int64_t i = 0; i < a.key.row; i += CACHE_LINE) {
      __builtin_prefetch(key + i);
      __builtin_prefetch(value + i);
    }
  }
}

inline bool are_ancestors_valid(const Attention& a) {
  return std::all_of(a.ancestors, a.ancestors + a.batch * a.keys,
                     [&](int64_t row) { return row >= 0 && row < a.rows; });
}

// Attention of the hypotheses [part * HYPOTHESES, (part + 1) * HYPOTHESES).
template <class Sigma>
void decode_part(const Attention& a, int64_t part, float* scratch) {
  const int64_t last = std::min((part + 1) * HYPOTHESES, a.batch);
  for (int64_t b = part * HYPOTHESES; b < last; b++) {
    if (b + 1 < last) prefetch_hypothesis(a, b + 1);
    for (int64_t h = 0; h < a.heads; h++) decode_head<Sigma>(a, b, h, NONE, scratch);
  }
}

// `dispatch_modulator` for attention, which may scale a modulator's values.
template <class Function>
void dispatch_sigma(const Attention& a, Function function) {
  dispatch_modulator(a.columns, [&](auto* kind) {
    using Sigma = std::remove_pointer_t<decltype(kind)>;
    if constexpr (std::is_same_v<Sigma, Modulator> || std::is_same_v<Sigma, MonotoneModulator>)
      if (a.factor) return function(static_cast<Scaled<Sigma>*>(nullptr));
    function(kind);
  });
}

}  // namespace

// Attention with one query per hypothesis. Returns 1; 0 if it runs out of memory; -1 if an ancestor
// is not a valid row.
extern "C" int attention_step(const Attention* attention) {
  Attention a = *attention;
  if (!are_ancestors_valid(a)) return -1;
  const int64_t parts = (a.batch + HYPOTHESES - 1) / HYPOTHESES;
  return guarded([&] {
    std::vector<float> factors(a.factor ? a.batch * a.heads : 0);
    const float length = std::log(double(a.keys));
    for (size_t i = 0; i < factors.size(); i++) factors[i] = a.factor[i % a.heads] * length;
    if (a.factor) a.factor = factors.data();
    dispatch_sigma(a, [&](auto* kind) {
      for_each_piece(parts, a.threads, padded(a.keys), [&](int64_t part, int64_t, float* scratch) {
        decode_part<std::remove_pointer_t<decltype(kind)>>(a, part, scratch);
      });
    });
  });
}

extern "C" int attention_forward(const Attention* attention) {
  const Attention& a = *attention;
  // The backward pass recomputes the scores as the tiled kernel does, so its statistics must come
  // from that kernel, not from the decoding kernel.
  const bool decodes = a.queries <= DECODE_QUERIES && a.size % LANES == 0 && a.dropout == 0;
  return guarded([&] {
    dispatch_sigma(a, [&](auto* kind) {
      using Sigma = std::remove_pointer_t<decltype(kind)>;
      if (decodes && !a.statistics)
        for_each_head(a, padded(a.keys), decode_head<Sigma>);
      else
        for_each_head(a, forward_scratch(a),
                   a.mask.data ? forward_head<Sigma, true> : forward_head<Sigma, false>);
    });
  });
}

extern "C" int attention_backward(const Attention* attention) {
  return guarded([&] {
    Backward a{*attention};
    const int64_t heads = a.batch * a.heads;
    std::vector<double> parameter_sums(heads * COLUMNS), sink_sums(heads);
    a.parameter_sums = parameter_sums.data(), a.sink_sums = sink_sums.data();
    dispatch_sigma(a, [&](auto* kind) {
      using Sigma = std::remove_pointer_t<decltype(kind)>;
      for_each_head(a, backward_scratch(a),
                 a.mask.data ? backward_head<Sigma, true> : backward_head<Sigma, false>);
    });
    if (a.grad_parameters)
      sum_partials(a.parameter_sums, heads, COLUMNS, a.head_stride ? a.heads : 1, a.columns,
                   a.grad_parameters);
    if (a.grad_sink) sum_partials(a.sink_sums, heads, 1, a.heads, 1, a.grad_sink);
  });
}
