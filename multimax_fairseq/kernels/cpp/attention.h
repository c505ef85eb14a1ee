// Attention whose scores are modulated before the softmax, forward and backward.
#pragma once

#include "modulator.h"
#include "vectors.h"

struct Tensor4 {  // (batch, heads, length, size), the last dimension dense
  float* data;
  int64_t batch, head, row;
  float* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Mask {  // (batch, heads, queries, keys), the stride of a dimension of size 1 being 0
  const void* data;       // null for none
  int64_t is_float;       // added to the modulated scores; else bool, where true excludes
  int64_t strides[4];
};

struct Attention {
  int64_t batch, heads, queries, keys, size, threads;
  int64_t columns, table_row;  // of the table, 0 for none; from a head's row to the next
  float scale, dropout;        // dropout: the probability of dropping
  uint64_t seed;
  // Query t of sentence b may attend to keys starts[b, t] <= s < ends[b, t]; null: to all.
  const int32_t *starts, *ends;
  const float* table;
  const float* sink;   // (heads,), the score of an entry without a key; null for none
  float* statistics;   // (batch, heads, 2, queries): the largest score, 1 / sum of exp; or null
  double* grad_table;  // (batch, heads, COLUMNS), or null
  double* grad_sink;   // (batch, heads), or null
  Mask mask;           // what the windows do not say
  Tensor4 query, key, value, output, grad_output, grad_query, grad_key, grad_value;
  // Of hypotheses that share the keys of each step, (rows[s], heads, size): key s of hypothesis b is
  // that of row ancestors[b, s], (batch, keys). Null where each has its own.
  const int64_t *ancestors, *rows;
  const float *const *step_keys, *const *step_values;

  template <class Sigma>
  Sigma sigma(int64_t h) const {
    return Sigma(table + h * table_row);
  }
  float sink_of(int64_t h) const { return sink ? sink[h] : -INFINITE; }
};

namespace {

// Tiles of a block of queries stay in the L2 cache with KEYS rows, in the L1 cache with FEW_KEYS.
constexpr int64_t QUERIES = 64, KEYS = 512, FEW_KEYS = 64;
constexpr int64_t FEW_QUERIES = 8;

// Whether products can take a head's rows as they are: rows of another stride may share cache lines.
inline bool are_dense(const Tensor4& t, int64_t rows, int64_t size) {
  return t.row == size && rows % LANES == 0 && size % LANES == 0;
}

// A head's rows, each padded to a multiple of LANES, as is their number: where they are, or copied.
const float* dense_rows(
    const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch) {
  if (are_dense(t, rows, size)) return t.at(b, h);
  if (rows % LANES || size % LANES) std::fill_n(scratch, padded(rows) * padded(size), 0.0f);
  copy(t.at(b, h), t.row, rows, size, scratch, padded(size));
  return scratch;
}

// The same of rows to add up in, zero at first: where they are to be, or put there at the end.
struct Rows {
  const int64_t rows, size, stride;
  float *const out, *const data;
  Rows(const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch)
      : rows(rows), size(size), stride(t.row), out(t.at(b, h)),
        data(are_dense(t, rows, size) ? out : scratch) {
    std::fill_n(data, padded(rows) * padded(size), 0.0f);
  }
  void put_back() const {
    if (data != out) copy(data, padded(size), rows, size, out, stride);
  }
};

// What the mask says of query t and key s: 0 or -inf, or the float itself.
inline float mask_at(const Mask& m, int64_t row, int64_t s) {
  const int64_t i = row + s * m.strides[3];
  if (m.is_float) return static_cast<const float*>(m.data)[i];
  return static_cast<const uint8_t*>(m.data)[i] ? -INFINITE : 0;
}
inline int64_t mask_row(const Mask& m, int64_t b, int64_t h, int64_t t) {
  return b * m.strides[0] + h * m.strides[1] + t * m.strides[2];
}

// The same of queries q0 <= t < q0 + count and keys s0 <= s < s1, as (s1 - s0, QUERIES).
void mask_tile(
    const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t count, int64_t s0, int64_t s1,
    float* out) {
  std::fill_n(out, (s1 - s0) * QUERIES, 0.0f);
  for (int64_t q = 0; q < count; q++) {
    const int64_t row = mask_row(a.mask, b, h, q0 + q);
    for (int64_t s = s0; s < std::min(s1, a.keys); s++)
      out[(s - s0) * QUERIES + q] = mask_at(a.mask, row, s);
  }
}
// -inf excludes whatever the score is.
inline Vec masked(Vec z, Vec mask) { return mask == -INFINITE ? mask : z + mask; }

// The keys that a block of queries may attend to.
struct Window {
  alignas(64) int32_t starts[QUERIES], ends[QUERIES];
  int64_t first, last;            // the union over the queries: first <= s < last
  int64_t common_first, common_last;  // what all of them may attend to
  int64_t stops[QUERIES / LANES] = {};  // where the last window ends of each LANES of them
  // That within keys s0 <= s < s1, of which the rest is nothing to queries q to q + LANES - 1.
  int64_t stop(int64_t q, int64_t s0, int64_t s1) const {
    return std::clamp(stops[q / LANES], s0, s1);
  }
  // Calls product(s, q) for keys s0 <= s < s1, LANES at a time: a query before q may attend to none
  // of these. One product for all of them, then the next: two in turn would leave the L1 cache.
  template <class Product>
  void each(int64_t s0, int64_t s1, Product product) const {
    for (int64_t s = s0, q = 0; s < s1; s += LANES, q = 0) {
      while (q < QUERIES - LANES && stops[q / LANES] <= s) q += LANES;
      product(s, q);
    }
  }
};

Window window(const Attention& a, int64_t b, int64_t q0, int64_t count) {
  Window w;
  w.first = a.keys, w.last = 0, w.common_first = 0, w.common_last = a.keys;
  for (int64_t q = 0; q < QUERIES; q++) {
    const bool real = q < count;
    const int64_t at = b * a.queries + q0 + q;
    w.starts[q] = real && a.starts ? a.starts[at] : 0;
    w.ends[q] = !real ? 0 : a.ends ? a.ends[at] : a.keys;
    if (!real) continue;
    if (w.starts[q] < w.ends[q]) {
      w.stops[q / LANES] = std::max<int64_t>(w.stops[q / LANES], w.ends[q]);
      w.first = std::min<int64_t>(w.first, w.starts[q]);
      w.last = std::max<int64_t>(w.last, w.ends[q]);
    }
    w.common_first = std::max<int64_t>(w.common_first, w.starts[q]);
    w.common_last = std::min<int64_t>(w.common_last, w.ends[q]);
  }
  // Nothing to read of the columns that only fill the block.
  if (count % LANES) w.common_last = 0;
  w.first = std::min(w.first, w.last);
  return w;
}

// All ones where query q + lane may attend to key s.
inline IntVec may_attend(const Window& w, int64_t q, int64_t s) {
  const int32_t key = s;
  return (load(w.starts + q) <= key) & (load(w.ends + q) > key);
}

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 1 / (1 - dropout) where an attention probability is kept, else 0: a hash of where it stands.
struct Dropout {
  float factor;
  uint32_t threshold;
  uint64_t seed;
  Dropout(const Attention& a, int64_t bh)
      : factor(1 / (1 - a.dropout)),
        threshold(static_cast<uint32_t>(a.dropout * 4294967296.0)),
        seed(mix(a.seed + 0x9e3779b97f4a7c15u * (bh + 1))) {}
  uint32_t key(int64_t s) const { return static_cast<uint32_t>(mix(seed + s)); }
  Vec keep(uint32_t key, int64_t q) const {
    UintVec x;
    for (int64_t i = 0; i < LANES; i++) x[i] = static_cast<uint32_t>(q + i);
    x = x * 0x9e3779b9u ^ key;
    x = (x ^ (x >> 16)) * 0x85ebca6bu;
    x = (x ^ (x >> 13)) * 0xc2b2ae35u;
    x = x ^ (x >> 16);
    return x >= threshold ? all(factor) : Vec{};
  }
};

// What exp(score - top) is to be multiplied by: 0 for a query that may attend to nothing.
inline float share(float sum, float sink) {
  if (!(sink < INFINITE)) return std::numeric_limits<float>::quiet_NaN();
  return sum > 0 ? 1 / sum : 0;
}

template <class Sigma, bool MASKED>
void forward_head(const Attention& a, int64_t b, int64_t h, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size, pitch = padded(size);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  const Dropout dropout(a, bh);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, pitch)
  float* rows = scratch + keys * pitch;
  const float* value = dense_rows(a.value, b, h, a.keys, size, rows);  // (keys, pitch)
  float* query = rows + keys * pitch;        // (size, QUERIES), scaled
  float* output = query + size * QUERIES;    // (QUERIES, pitch)
  float* scores = output + QUERIES * pitch;  // (KEYS, QUERIES)
  float* mask = scores + KEYS * QUERIES;     // (KEYS, QUERIES), if there is a mask

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a, b, q0, count);
    if (count < QUERIES) std::fill(query, output, 0.0f);
    transpose(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, QUERIES,
              a.scale);
    alignas(64) float top[QUERIES], sum[QUERIES], shrink[QUERIES];
    std::fill(top, top + QUERIES, sink);
    std::fill(sum, sum + QUERIES, sink == -INFINITE ? 0.0f : 1.0f);
    const int64_t first = w.first / LANES * LANES;
    if (first >= w.last) std::fill(output, scores, 0.0f);
    for (int64_t s0 = first, s1; s0 < w.last; s0 = s1) {
      s1 = std::min(s0 + KEYS, padded(w.last));
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        small_product(LANES, width - q, size, key + s * pitch, pitch, 1, query + q, QUERIES,
                      scores + (s - s0) * QUERIES + q, QUERIES, false);
      });
      if (MASKED) mask_tile(a, b, h, q0, count, s0, s1, mask);
      for (int64_t q = 0; q < width; q += LANES) {
        Vec most = load(top + q);
        const int64_t stop = w.stop(q, s0, s1);
        for (int64_t s = s0; s < stop; s++) {
          float* at = scores + (s - s0) * QUERIES + q;
          Vec z = sigma.value(load(at));
          if (MASKED) z = masked(z, load(mask + (at - scores)));
          if (s < w.common_first || s >= w.common_last)
            z = may_attend(w, q, s) ? z : all(-INFINITE);
          store(at, z);
          most = larger(most, z);
        }
        const Vec old = load(top + q);
        store(top + q, most);
        // Nothing to attend to so far: any finite number keeps exp(-inf - it) at 0.
        most = most == -INFINITE ? Vec{} : most;
        Vec parts[4] = {};  // shorter sums, which round less
        for (int64_t s = s0; s < stop; s++) {
          float* at = scores + (s - s0) * QUERIES + q;
          const Vec p = exponential(load(at) - most);
          parts[s % 4] += p;
          store(at, a.dropout > 0 ? p * dropout.keep(dropout.key(s), q0 + q) : p);
        }
        const Vec factor = exponential(old - most);
        store(shrink + q, factor);
        store(sum + q, load(sum + q) * factor + (parts[0] + parts[1]) + (parts[2] + parts[3]));
      }
      if (s0 > first)
        for (int64_t q = 0; q < width; q++)
          for (int64_t d = 0; d < pitch; d += LANES) {
            float* at = output + q * pitch + d;
            store(at, load(at) * shrink[q]);
          }
      for (int64_t s = s0; s < s1; s += FEW_KEYS)
        for (int64_t q = 0; q < width; q += LANES) {
          const int64_t some = w.stop(q, s, std::min(s + FEW_KEYS, s1)) - s;
          if (some || s == first)
            small_product(LANES, pitch, some, scores + (s - s0) * QUERIES + q, 1, QUERIES,
                          value + s * pitch, pitch, output + q * pitch, pitch, s > first);
        }
    }
    float inverse[QUERIES];
    for (int64_t q = 0; q < count; q++) {
      inverse[q] = share(sum[q], sink);
      if (!a.statistics) continue;
      // A query that may attend to nothing has the inverse 0, and a finite top.
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
  return (2 * keys + QUERIES) * pitch + (a.size + tiles * KEYS) * QUERIES;
}

// Where key or value s of row b stands.
inline const float* row_of(
    const Attention& a, const Tensor4& own, const float* const* steps, int64_t b, int64_t h,
    int64_t s) {
  if (!steps) return own.at(b, h) + s * own.row;
  return steps[s] + (a.ancestors[b * a.keys + s] * a.heads + h) * a.size;
}

// Decoding: too few queries to fill a tile. Keys are read where they are.
template <class Sigma>
void forward_few(const Attention& a, int64_t b, int64_t h, float* scratch) {
  const int64_t size = a.size, length = padded(a.keys);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  for (int64_t t = 0; t < a.queries; t++) {
    const int64_t at = b * a.queries + t;
    const int64_t first = a.starts ? a.starts[at] : 0, last = a.ends ? a.ends[at] : a.keys;
    const float* query = a.query.at(b, h) + t * a.query.row;
    float* out = a.output.at(b, h) + t * a.output.row;
    Vec most = all(-INFINITE);
    for (int64_t s0 = 0; s0 < length; s0 += LANES) {
      Vec products[LANES] = {};
      for (int64_t s = std::max(s0, first); s < std::min(s0 + LANES, last); s++) {
        const float* key = row_of(a, a.key, a.step_keys, b, h, s);
        Vec sum{};
        for (int64_t d = 0; d < size; d += LANES) sum += load(query + d) * load(key + d);
        products[s - s0] = sum;
      }
      const IntVec s = count_from(s0), may_attend = (s >= int32_t(first)) & (s < int32_t(last));
      const Vec z = may_attend ? sigma.value(a.scale * totals(products)) : all(-INFINITE);
      store(scratch + s0, z);
      most = larger(most, z);
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
      top = std::max(top, largest(most));
    }
    Vec sums{};
    for (int64_t s = 0; s < length; s += LANES) {
      const Vec p = exponential(load(scratch + s) - (top == -INFINITE ? 0 : top));
      store(scratch + s, p);
      sums += p;
    }
    const float rest = sink == -INFINITE ? 0 : std::exp(sink - top);
    const float inverse = share(rest + static_cast<float>(total(sums)), sink);
    const auto put = [&]<int parts>(std::integral_constant<int, parts>, int64_t d) {
      Vec result[parts] = {};
      for (int64_t s = first; s < last; s++) {
        const float* value = row_of(a, a.value, a.step_values, b, h, s) + d;
        for (int i = 0; i < parts; i++) result[i] += scratch[s] * load(value + i * LANES);
      }
      for (int i = 0; i < parts; i++) store(out + d + i * LANES, result[i] * inverse);
    };
    int64_t d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES) put(std::integral_constant<int, 4>(), d);
    for (; d + 2 * LANES <= size; d += 2 * LANES) put(std::integral_constant<int, 2>(), d);
    if (d < size) put(std::integral_constant<int, 1>(), d);
  }
}

template <class Sigma, bool MASKED>
void backward_head(const Attention& a, int64_t b, int64_t h, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size, pitch = padded(size);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  const Dropout dropout(a, bh);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, pitch)
  float* rows = scratch + keys * pitch;
  const float* value = dense_rows(a.value, b, h, a.keys, size, rows);  // (keys, pitch)
  const Rows grad_key(a.grad_key, b, h, a.keys, size, rows + keys * pitch);
  const Rows grad_value(a.grad_value, b, h, a.keys, size, rows + 2 * keys * pitch);
  float* query = rows + 3 * keys * pitch;              // (QUERIES, pitch), scaled
  float* grad_output = query + QUERIES * pitch;        // (QUERIES, pitch)
  float* grad_query = grad_output + QUERIES * pitch;   // (QUERIES, pitch)
  float* query_t = grad_query + QUERIES * pitch;       // (size, QUERIES)
  float* grad_output_t = query_t + size * QUERIES;     // (size, QUERIES)
  float* scores = grad_output_t + size * QUERIES;      // (keys, QUERIES), then their gradients
  float* probs = scores + keys * QUERIES;              // (keys, QUERIES)
  float* grad_probs = probs + keys * QUERIES;          // (keys, QUERIES)
  float* mask = grad_probs + keys * QUERIES;           // (FEW_KEYS, QUERIES), if there is a mask

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a, b, q0, count);
    const int64_t first = w.first / LANES * LANES, last = padded(w.last);
    if (first >= last) std::fill(grad_query, query_t, 0.0f);
    if (count < QUERIES || size < pitch) std::fill(query, scores, 0.0f);
    const float* grads = a.grad_output.at(b, h) + q0 * a.grad_output.row;
    copy(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, pitch, a.scale);
    transpose(query, pitch, count, size, query_t, QUERIES);
    copy(grads, a.grad_output.row, count, size, grad_output, pitch);
    transpose(grad_output, pitch, count, size, grad_output_t, QUERIES);
    alignas(64) float tops[QUERIES] = {}, inverses[QUERIES] = {}, means[QUERIES] = {};
    const float* statistics = a.statistics + 2 * bh * a.queries + q0;
    std::copy_n(statistics, count, tops);
    std::copy_n(statistics + a.queries, count, inverses);

    // The probabilities, and the mean of their gradients: formed of the very numbers that it is
    // subtracted from, because what is left of them has to sum to zero. The product of the output
    // and its gradient is the same, but for the rounding of the output.
    for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
      s1 = std::min(s0 + FEW_KEYS, last);
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        small_product(LANES, width - q, size, key + s * pitch, pitch, 1, query_t + q, QUERIES,
                      scores + s * QUERIES + q, QUERIES, false);
      });
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        small_product(LANES, width - q, size, value + s * pitch, pitch, 1, grad_output_t + q,
                      QUERIES, grad_probs + s * QUERIES + q, QUERIES, false);
      });
      if (MASKED) mask_tile(a, b, h, q0, count, s0, s1, mask);
      for (int64_t q = 0; q < width; q += LANES) {
        const Vec top = load(tops + q), inverse = load(inverses + q);
        Vec mean{};
        const int64_t stop = w.stop(q, s0, s1);
        for (int64_t s = s0; s < stop; s++) {
          const int64_t at = s * QUERIES + q;
          Vec z = sigma.value(load(scores + at));
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
    if (a.grad_sink)  // its own value is zero, so that the mean is all that its gradient has
      for (int64_t q = 0; q < count; q++)
        a.grad_sink[bh] -= std::exp(sink - tops[q]) * inverses[q] * means[q];
    for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
      s1 = std::min(s0 + FEW_KEYS, last);
      Sums sums;
      for (int64_t q = 0; q < width; q += LANES) {
        const Vec mean = load(means + q);
        const int64_t stop = w.stop(q, s0, s1);
        for (int64_t s = s0; s < stop; s++) {
          const int64_t at = s * QUERIES + q;
          const Vec p = load(probs + at), grad = p * (load(grad_probs + at) - mean);
          store(scores + at, sigma.backward(load(scores + at), grad, sums));
          if (a.dropout > 0) store(probs + at, p * dropout.keep(dropout.key(s), q0 + q));
        }
        for (int64_t s = stop; s < s1; s++) store(scores + s * QUERIES + q, Vec{});
      }
      if (a.grad_table) sigma.add(sums, a.grad_table + bh * COLUMNS);
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        small_product(LANES, pitch, width - q, probs + s * QUERIES + q, QUERIES, 1,
                      grad_output + q * pitch, pitch, grad_value.data + s * pitch, pitch, true);
      });
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        small_product(LANES, pitch, width - q, scores + s * QUERIES + q, QUERIES, 1,
                      query + q * pitch, pitch, grad_key.data + s * pitch, pitch, true);
      });
      for (int64_t q = 0; q < width; q += LANES)
        small_product(LANES, pitch, w.stop(q, s0, s1) - s0, scores + s0 * QUERIES + q, 1, QUERIES,
                      key + s0 * pitch, pitch, grad_query + q * pitch, pitch, s0 > first);
    }
    copy(grad_query, pitch, count, size, a.grad_query.at(b, h) + q0 * a.grad_query.row,
         a.grad_query.row, a.scale);
  }
  grad_key.put_back();
  grad_value.put_back();
}

int64_t backward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys), pitch = padded(a.size), tile = a.mask.data ? FEW_KEYS : 0;
  return (4 * keys + 3 * QUERIES) * pitch + (2 * a.size + 3 * keys + tile) * QUERIES;
}

// A thread takes the next few heads when it is free: sentences differ in length, and processors may
// have other work. What is formed of a head is the same in any thread.
template <class Head>
void every_head(const Attention& a, int64_t scratch_size, Head head) {
  const int64_t heads = a.batch * a.heads, threads = std::min(a.threads, heads);
  const int64_t few = std::max<int64_t>(1, heads / (32 * threads));
  // Not in the threads, where running out of memory would end the process.
  const Buffer scratch(threads * padded(scratch_size));
  std::atomic<int64_t> next = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++)
    for (int64_t j0; (j0 = next.fetch_add(few)) < heads;)
      for (int64_t j = j0; j < std::min(j0 + few, heads); j++)
        head(a, j / a.heads, j % a.heads, scratch + i * padded(scratch_size));
}

}  // namespace

// Attention of one query a hypothesis. Returns 1; 0 if it ran out of memory; -1 - s if an ancestor at
// step s is none of its rows.
extern "C" int attention_step(const Attention* attention) {
  const Attention& a = *attention;
  for (int64_t i = 0; i < a.batch * a.keys; i++)
    if (a.ancestors[i] < 0 || a.ancestors[i] >= a.rows[i % a.keys])
      return static_cast<int>(-1 - i % a.keys);
  return guarded([&] {
    with_modulator(a.columns, [&](auto* kind) {
      every_head(a, padded(a.keys), forward_few<std::remove_pointer_t<decltype(kind)>>);
    });
  });
}

extern "C" int attention_forward(const Attention* attention) {
  const Attention& a = *attention;
  // The backward pass wants statistics of the very scores that it forms.
  const bool few = a.queries <= FEW_QUERIES && a.size % LANES == 0 && a.dropout == 0;
  return guarded([&] {
    with_modulator(a.columns, [&](auto* kind) {
      using Sigma = std::remove_pointer_t<decltype(kind)>;
      if (few && !a.statistics)
        every_head(a, padded(a.keys), forward_few<Sigma>);
      else
        every_head(a, forward_scratch(a),
                   a.mask.data ? forward_head<Sigma, true> : forward_head<Sigma, false>);
    });
  });
}

extern "C" int attention_backward(const Attention* attention) {
  const Attention& a = *attention;
  return guarded([&] {
    with_modulator(a.columns, [&](auto* kind) {
      using Sigma = std::remove_pointer_t<decltype(kind)>;
      every_head(a, backward_scratch(a),
                 a.mask.data ? backward_head<Sigma, true> : backward_head<Sigma, false>);
    });
  });
}

namespace {

// The keys that a row of a mask allows, start <= s < end; false if they are not in a row, or if a
// float both allows and is not 0.
bool read_row(
    const Mask& mask, int64_t row, int64_t keys, uint8_t* allowed, int32_t* start, int32_t* end) {
  bool odd = false;
  for (int64_t s = 0; s < keys; s++) {
    const float x = mask_at(mask, row, s);
    allowed[s] = x != -INFINITE;
    odd |= allowed[s] && x != 0;
  }
  const uint8_t* stop = allowed + keys;
  const uint8_t* first = std::find(allowed, const_cast<uint8_t*>(stop), 1);
  const uint8_t* last = std::find(first, stop, 0);
  *start = first - allowed, *end = first == stop ? *start : last - allowed;
  return !odd && std::find(last, stop, 1) == stop;
}

}  // namespace

// Writes the keys that each query may attend to, starts <= s < ends, both (batch, queries): all, in
// causal order those up to its own, less what a mask that is the same for all heads excludes. Returns
// 0, the mask left out, where what it allows is not in a row for each query.
extern "C" int find_windows(
    const Mask* mask, int64_t batch, int64_t queries, int64_t keys, int64_t is_causal,
    int32_t* starts, int32_t* ends) {
  std::fill_n(starts, batch * queries, 0);
  for (int64_t i = 0; i < batch * queries; i++)
    ends[i] = is_causal ? std::min(i % queries + 1, keys) : keys;
  if (!mask) return 1;
  const Mask& m = *mask;
  const int64_t rows = m.strides[2] ? queries : 1, sentences = m.strides[0] ? batch : 1;
  bool is_window = true;
  const int done = guarded([&] {
    std::vector<uint8_t> allowed(keys);
    std::vector<int32_t> found(2 * rows * sentences);
    for (int64_t i = 0; i < rows * sentences && is_window; i++)
      is_window = read_row(m, mask_row(m, i / rows, 0, i % rows), keys, allowed.data(),
                           &found[2 * i], &found[2 * i + 1]);
    for (int64_t b = 0; b < batch && is_window; b++)
      for (int64_t t = 0; t < queries; t++) {
        const int32_t* row = &found[2 * ((sentences > 1 ? b : 0) * rows + (rows > 1 ? t : 0))];
        int32_t& start = starts[b * queries + t];
        int32_t& end = ends[b * queries + t];
        start = std::max(start, row[0]), end = std::max(start, std::min(end, row[1]));
      }
  });
  return done && is_window;
}
