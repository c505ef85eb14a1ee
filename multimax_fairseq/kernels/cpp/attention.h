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

constexpr int64_t QUERIES = 64;  // a block; with KEYS rows of it the tiles stay in the L2 cache
constexpr int64_t KEYS = 512, KEYS_BACKWARD = 64;
constexpr int64_t FEW_QUERIES = 8, FEW_KEYS = 128;
constexpr int64_t PIECE = 32;  // of keys, and of queries, where some may not attend to the others

// Keys s0 <= s < the result go through a product together: never across a multiple of `most`, and
// in few different numbers, because oneDNN keeps the code that it makes for each size of a product.
inline int64_t block_end(int64_t s0, int64_t last, int64_t most) {
  const int64_t end = std::min((s0 / most + 1) * most, last);
  return end - s0 <= FEW_KEYS ? end : s0 + (end - s0) / 64 * 64;
}

// Keys or values transposed: blocks of KEYS columns, each (size, pitch), for the same reason.
struct Columns {
  int64_t size, pitch;
  Columns(int64_t keys, int64_t size) : size(size), pitch(padded(keys)) {
    if (keys <= FEW_KEYS) return;
    for (pitch = 2 * FEW_KEYS; pitch < std::min(keys, KEYS);) pitch *= 2;
    pitch += LANES;  // rows that are powers of two apart would share cache lines
  }
  int64_t floats(int64_t keys) const { return (keys + KEYS - 1) / KEYS * size * pitch; }
  void fill(const float* in, int64_t row, int64_t keys, float* out) const {
    for (int64_t s = 0; s < keys; s += KEYS, out += size * pitch) {
      const int64_t count = std::min(KEYS, keys - s);
      transpose(in + s * row, row, count, size, out, pitch);
      for (int64_t d = 0; d < size; d++)
        std::fill(out + d * pitch + count, out + d * pitch + padded(count), 0.0f);
    }
  }
  const float* at(const float* out, int64_t s) const {
    return out + s / KEYS * size * pitch + s % KEYS;
  }
};

// Whether a product can take a head's rows as they are; those of other strides may share cache lines.
inline bool are_dense(const Tensor4& t, int64_t rows, int64_t size) {
  return t.row == size && rows % LANES == 0;
}

// A head's rows, dense, and zeros to the next multiple of LANES: where they are, or copied.
const float* dense_rows(
    const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch) {
  if (are_dense(t, rows, size)) return t.at(b, h);
  copy(t.at(b, h), t.row, rows, size, scratch);
  std::fill(scratch + rows * size, scratch + padded(rows) * size, 0.0f);
  return scratch;
}

// A head's rows to add up in, dense and zero at first: where they are to be, or put there at the end.
struct Rows {
  const int64_t rows, size, stride;
  float *const out, *const data;
  Rows(const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch)
      : rows(rows), size(size), stride(t.row), out(t.at(b, h)),
        data(are_dense(t, rows, size) ? out : scratch) {
    std::fill_n(data, padded(rows) * size, 0.0f);
  }
  void put_back() const {
    if (data == out) return;
    for (int64_t r = 0; r < rows; r++) std::copy_n(data + r * size, size, out + r * stride);
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
  // Calls product(s, end, q) for keys s0 <= s < s1 in pieces: to those of a piece, queries before q may
  // not attend. The very first are for all queries, whose sums start with them.
  template <class Product>
  void pieces(int64_t s0, int64_t s1, int64_t width, Product product) const {
    int64_t whole = s1;
    for (int64_t q = 0; q < width; q += LANES) whole = std::min(whole, padded(stop(q, s0, s1)));
    // In few different numbers, as `block_end` says.
    if (whole < s1) whole -= (whole - s0) % QUERIES;
    if (whole > s0) product(s0, whole, int64_t{0});
    for (int64_t s = whole, q = 0, end; s < s1; s = end) {
      end = std::min(s + PIECE, s1);
      const auto is_past = [&](int64_t stop) { return stop <= s; };
      while (s > first && q + PIECE < width &&
             std::all_of(stops + q / LANES, stops + (q + PIECE) / LANES, is_past))
        q += PIECE;
      product(s, end, q);
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
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size;
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  const Dropout dropout(a, bh);
  const Columns columns(keys, size);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, size)
  float* value = scratch + keys * size;            // its columns
  float* query = value + columns.floats(keys);     // (size, QUERIES), scaled
  float* output = query + size * QUERIES;          // (size, QUERIES)
  float* scores = output + size * QUERIES;         // (KEYS, QUERIES)
  float* mask = scores + KEYS * QUERIES;           // (KEYS, QUERIES), if there is a mask
  columns.fill(a.value.at(b, h), a.value.row, a.keys, value);

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
      s1 = block_end(s0, padded(w.last), KEYS);
      w.pieces(s0, s1, width, [&](int64_t s, int64_t end, int64_t q) {
        product(end - s, width - q, size, key + s * size, size, query + q, QUERIES,
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
        for (int64_t s = stop; s < s1; s++) store(scores + (s - s0) * QUERIES + q, Vec{});
        const Vec factor = exponential(old - most);
        store(shrink + q, factor);
        store(sum + q, load(sum + q) * factor + (parts[0] + parts[1]) + (parts[2] + parts[3]));
      }
      if (s0 > first)
        for (int64_t d = 0; d < size; d++)
          for (int64_t q = 0; q < width; q += LANES) {
            float* at = output + d * QUERIES + q;
            store(at, load(at) * load(shrink + q));
          }
      w.pieces(s0, s1, width, [&](int64_t s, int64_t end, int64_t q) {
        product(size, width - q, end - s, columns.at(value, s), columns.pitch,
                scores + (s - s0) * QUERIES + q, QUERIES, output + q, QUERIES, s > first);
      });
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
    transpose(output, QUERIES, size, count, out, a.output.row);
    for (int64_t q = 0; q < count; q++)
      for (int64_t d = 0; d < size; d++) out[q * a.output.row + d] *= inverse[q];
  }
}

int64_t forward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys), tiles = a.mask.data ? 2 : 1;
  return keys * a.size + Columns(keys, a.size).floats(keys) + 2 * a.size * QUERIES +
         tiles * KEYS * QUERIES;
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
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size;
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  const Dropout dropout(a, bh);
  const Columns columns(keys, size);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, size)
  float* key_t = scratch + keys * size;            // its columns
  float* value_rows = key_t + columns.floats(keys);
  const float* value = dense_rows(a.value, b, h, a.keys, size, value_rows);  // (keys, size)
  const Rows grad_key(a.grad_key, b, h, a.keys, size, value_rows + keys * size);
  const Rows grad_value(a.grad_value, b, h, a.keys, size, value_rows + 2 * keys * size);
  float* query = value_rows + 3 * keys * size;     // (QUERIES, size), scaled
  float* query_t = query + size * QUERIES;     // (size, QUERIES)
  float* grad_output = query_t + size * QUERIES;            // (QUERIES, size)
  float* grad_output_t = grad_output + size * QUERIES;      // (size, QUERIES)
  float* grad_query_t = grad_output_t + size * QUERIES;     // (size, QUERIES)
  float* scores = grad_query_t + size * QUERIES;            // (keys, QUERIES), then their gradients
  float* probs = scores + keys * QUERIES;                   // (keys, QUERIES)
  float* grad_probs = probs + keys * QUERIES;               // (keys, QUERIES)
  float* mask = grad_probs + keys * QUERIES;  // (KEYS_BACKWARD, QUERIES), if there is a mask
  columns.fill(a.key.at(b, h), a.key.row, a.keys, key_t);

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a, b, q0, count);
    const int64_t first = w.first / LANES * LANES, last = padded(w.last);
    if (first >= last) std::fill(grad_query_t, scores, 0.0f);
    if (count < QUERIES) std::fill(query, grad_query_t, 0.0f);
    const float* grads = a.grad_output.at(b, h) + q0 * a.grad_output.row;
    copy(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, a.scale);
    transpose(query, size, count, size, query_t, QUERIES);
    copy(grads, a.grad_output.row, count, size, grad_output);
    transpose(grads, a.grad_output.row, count, size, grad_output_t, QUERIES);
    alignas(64) float tops[QUERIES] = {}, inverses[QUERIES] = {}, means[QUERIES] = {};
    const float* statistics = a.statistics + 2 * bh * a.queries + q0;
    std::copy_n(statistics, count, tops);
    std::copy_n(statistics + a.queries, count, inverses);

    // The probabilities, and the mean of their gradients: formed of the very numbers that it is
    // subtracted from, because what is left of them has to sum to zero. The product of the output
    // and its gradient is the same, but for the rounding of the output.
    for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
      s1 = block_end(s0, last, KEYS_BACKWARD);
      w.pieces(s0, s1, width, [&](int64_t s, int64_t end, int64_t q) {
        const int64_t at = s * QUERIES + q;
        product(end - s, width - q, size, key + s * size, size, query_t + q, QUERIES, scores + at,
                QUERIES, false);
        product(end - s, width - q, size, value + s * size, size, grad_output_t + q, QUERIES,
                grad_probs + at, QUERIES, false);
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
      s1 = block_end(s0, last, KEYS_BACKWARD);
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
      w.pieces(s0, s1, width, [&](int64_t s, int64_t end, int64_t q) {
        const int64_t at = s * QUERIES + q;
        product(end - s, size, width - q, probs + at, QUERIES, grad_output + q * size, size,
                grad_value.data + s * size, size, true);
        product(end - s, size, width - q, scores + at, QUERIES, query + q * size, size,
                grad_key.data + s * size, size, true);
        product(size, width - q, end - s, columns.at(key_t, s), columns.pitch, scores + at,
                QUERIES, grad_query_t + q, QUERIES, s > first);
      });
    }
    transpose(grad_query_t, QUERIES, size, count, a.grad_query.at(b, h) + q0 * a.grad_query.row,
              a.grad_query.row, a.scale);
  }
  grad_key.put_back();
  grad_value.put_back();
}

int64_t backward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys), tile = a.mask.data ? KEYS_BACKWARD * QUERIES : 0;
  return keys * (4 * a.size + 3 * QUERIES) + Columns(keys, a.size).floats(keys) +
         5 * a.size * QUERIES + tile;
}

template <class Head>
void every_head(const Attention& a, int64_t scratch_size, Head head) {
  const int64_t heads = a.batch * a.heads, threads = std::min(a.threads, heads);
  // Not in the threads, where running out of memory would end the process.
  const Buffer scratch(threads * padded(scratch_size));
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++) {
    for (int64_t j = heads * i / threads; j < heads * (i + 1) / threads; j++)
      head(a, j / a.heads, j % a.heads, scratch + i * padded(scratch_size));
    end_products();
  }
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

// Narrows the window of keys of each query, starts and ends (batch, queries), to what a mask that is
// the same for all heads allows. Returns 0, the windows as they were, where it is not a window for
// each query.
extern "C" int narrow_windows(
    const Mask* mask, int64_t batch, int64_t queries, int64_t keys, int32_t* starts,
    int32_t* ends) {
  const Mask& m = *mask;
  const int64_t rows = m.strides[2] ? queries : 1, sentences = m.strides[0] ? batch : 1;
  std::vector<uint8_t> allowed(keys);
  std::vector<int32_t> found(2 * rows * sentences);
  for (int64_t i = 0; i < rows * sentences; i++)
    if (!read_row(m, mask_row(m, i / rows, 0, i % rows), keys, allowed.data(), &found[2 * i],
                  &found[2 * i + 1]))
      return 0;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t t = 0; t < queries; t++) {
      const int32_t* row = &found[2 * ((sentences > 1 ? b : 0) * rows + (rows > 1 ? t : 0))];
      int32_t& start = starts[b * queries + t];
      int32_t& end = ends[b * queries + t];
      start = std::max(start, row[0]), end = std::max(start, std::min(end, row[1]));
    }
  return 1;
}
