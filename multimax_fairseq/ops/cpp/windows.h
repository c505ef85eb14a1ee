// Attention masks, and windows: the range of keys that a query may attend to.
#pragma once

#include "vectors.h"

struct Mask {  // (batch, heads, queries, keys); a dimension of size 1 has the stride 0
  const void* data;       // null: no mask
  int64_t is_float;       // 1: float, added to the modulated scores; 0: bool, true excludes
  int64_t strides[4];
};

namespace {

constexpr int64_t QUERIES = 64;  // queries in a block

// The mask's entry for key s as a float that is added to the score. `row` is from mask_row.
inline float mask_at(const Mask& m, int64_t row, int64_t s) {
  const int64_t i = row + s * m.strides[3];
  if (m.is_float) return static_cast<const float*>(m.data)[i];
  return static_cast<const uint8_t*>(m.data)[i] ? -INFINITE : 0;
}
// The offset of the mask's row for a query.
inline int64_t mask_row(const Mask& m, int64_t b, int64_t h, int64_t t) {
  return b * m.strides[0] + h * m.strides[1] + t * m.strides[2];
}

// Writes the mask of queries [q0, q0 + count) and keys [s0, s1), transposed: (s1 - s0, QUERIES).
void mask_tile(
    const Mask& m, int64_t keys, int64_t b, int64_t h, int64_t q0, int64_t count, int64_t s0,
    int64_t s1, float* out) {
  std::fill_n(out, (s1 - s0) * QUERIES, 0.0f);
  for (int64_t q = 0; q < count; q++) {
    const int64_t row = mask_row(m, b, h, q0 + q);
    for (int64_t s = s0; s < std::min(s1, keys); s++)
      out[(s - s0) * QUERIES + q] = mask_at(m, row, s);
  }
}
// Adds the mask to scores. A mask of -inf gives -inf even if the score is inf or NaN.
inline Vec masked(Vec z, Vec mask) { return mask == -INFINITE ? mask : z + mask; }

// The windows of a block of queries: query q may attend to the keys [starts[q], ends[q]).
struct Window {
  alignas(64) int32_t starts[QUERIES], ends[QUERIES];
  int64_t first, last;                  // [first, last) is the union of the windows
  int64_t common_first, common_last;    // [common_first, common_last) is their intersection
  int64_t stops[QUERIES / LANES] = {};  // the largest end in each group of LANES queries

  // The end of the keys within [s0, s1) that any of the queries [q, q + LANES) may attend to.
  int64_t stop(int64_t q, int64_t s0, int64_t s1) const {
    return std::clamp(stops[q / LANES], s0, s1);
  }
  // Calls product(s, q) for each group of LANES keys from s in [s0, s1). Queries before q may
  // attend to none of these keys. Callers finish one matrix product for the whole tile before the
  // next product: alternating two products would evict operands from the L1 cache.
  template <class Product>
  void for_each_key_group(int64_t s0, int64_t s1, Product product) const {
    for (int64_t s = s0, q = 0; s < s1; s += LANES, q = 0) {
      while (q < QUERIES - LANES && stops[q / LANES] <= s) q += LANES;
      product(s, q);
    }
  }
};

// The end of query t's keys without a mask.
inline int64_t causal_end(int64_t t, int64_t keys, int64_t is_causal) {
  return is_causal ? std::min(t + 1, keys) : keys;
}

// Returns the windows of the queries [q0, q0 + count) of sentence b.
Window window(
    const int32_t* starts, const int32_t* ends, int64_t queries, int64_t keys, int64_t is_causal,
    int64_t b, int64_t q0, int64_t count) {
  Window w;
  w.first = keys, w.last = 0, w.common_first = 0, w.common_last = keys;
  for (int64_t q = 0; q < QUERIES; q++) {
    const bool exists = q < count;
    const int64_t at = b * queries + q0 + q;
    w.starts[q] = exists && starts ? starts[at] : 0;
    w.ends[q] = !exists ? 0 : ends ? ends[at] : causal_end(q0 + q, keys, is_causal);
    if (!exists) continue;
    if (w.starts[q] < w.ends[q]) {
      w.stops[q / LANES] = std::max<int64_t>(w.stops[q / LANES], w.ends[q]);
      w.first = std::min<int64_t>(w.first, w.starts[q]);
      w.last = std::max<int64_t>(w.last, w.ends[q]);
    }
    w.common_first = std::max<int64_t>(w.common_first, w.starts[q]);
    w.common_last = std::min<int64_t>(w.common_last, w.ends[q]);
  }
  // An empty intersection makes the kernels apply the windows, which exclude the padding queries.
  if (count % LANES) w.common_last = 0;
  w.first = std::min(w.first, w.last);
  return w;
}

// The lane mask (-1 or 0) of the queries q + lane that may attend to key s.
inline IntVec may_attend(const Window& w, int64_t q, int64_t s) {
  const int32_t key = s;
  return (load(w.starts + q) <= key) & (load(w.ends + q) > key);
}

// Finds the window [start, end) of keys that a mask row allows. Returns false if the allowed keys
// are not contiguous or if a float mask has a value other than 0 and -inf. `allowed`, (keys,), is
// scratch memory.
bool row_window(
    const Mask& mask, int64_t row, int64_t keys, uint8_t* allowed, int32_t* start, int32_t* end) {
  bool irregular = false;
  for (int64_t s = 0; s < keys; s++) {
    const float x = mask_at(mask, row, s);
    allowed[s] = x != -INFINITE;
    irregular |= allowed[s] && x != 0;
  }
  const uint8_t* stop = allowed + keys;
  const uint8_t* first = std::find(allowed, const_cast<uint8_t*>(stop), 1);
  const uint8_t* last = std::find(first, stop, 0);
  *start = first - allowed, *end = first == stop ? *start : last - allowed;
  return !irregular && std::find(last, stop, 1) == stop;
}

}  // namespace

// Writes the window of keys [starts, ends) of each query; both are (batch, queries). The windows
// combine the causal mask, if any, with `mask`, which must be the same for all heads. Returns 1 if
// the windows describe `mask` completely. Otherwise returns 0, and the windows ignore `mask`.
extern "C" int find_windows(
    const Mask* mask, int64_t batch, int64_t queries, int64_t keys, int64_t is_causal,
    int32_t* starts, int32_t* ends) {
  std::fill_n(starts, batch * queries, 0);
  for (int64_t i = 0; i < batch * queries; i++) ends[i] = causal_end(i % queries, keys, is_causal);
  const Mask& m = *mask;
  const int64_t rows = m.strides[2] ? queries : 1, sentences = m.strides[0] ? batch : 1;
  bool is_window = true;
  const int done = guarded([&] {
    std::vector<uint8_t> allowed(keys);
    std::vector<int32_t> found(2 * rows * sentences);
    for (int64_t i = 0; i < rows * sentences && is_window; i++)
      is_window = row_window(m, mask_row(m, i / rows, 0, i % rows), keys, allowed.data(),
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
