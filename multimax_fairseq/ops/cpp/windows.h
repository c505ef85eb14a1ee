// Which keys a query may attend to: what a mask says, and where it can be said as a window.
#pragma once

#include "vectors.h"

struct Mask {  // (batch, heads, queries, keys), the stride of a dimension of size 1 being 0
  const void* data;       // null for none
  int64_t is_float;       // added to the modulated scores; else bool, where true excludes
  int64_t strides[4];
};

namespace {

constexpr int64_t QUERIES = 64;  // of a block, whose windows are looked at together

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
    const Mask& m, int64_t keys, int64_t b, int64_t h, int64_t q0, int64_t count, int64_t s0,
    int64_t s1, float* out) {
  std::fill_n(out, (s1 - s0) * QUERIES, 0.0f);
  for (int64_t q = 0; q < count; q++) {
    const int64_t row = mask_row(m, b, h, q0 + q);
    for (int64_t s = s0; s < std::min(s1, keys); s++)
      out[(s - s0) * QUERIES + q] = mask_at(m, row, s);
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

// Where the keys end that query t may attend to: in causal order after its own.
inline int64_t causal_end(int64_t t, int64_t keys, int64_t is_causal) {
  return is_causal ? std::min(t + 1, keys) : keys;
}

// Of queries q0 <= t < q0 + count of sentence b.
Window window(
    const int32_t* starts, const int32_t* ends, int64_t queries, int64_t keys, int64_t is_causal,
    int64_t b, int64_t q0, int64_t count) {
  Window w;
  w.first = keys, w.last = 0, w.common_first = 0, w.common_last = keys;
  for (int64_t q = 0; q < QUERIES; q++) {
    const bool real = q < count;
    const int64_t at = b * queries + q0 + q;
    w.starts[q] = real && starts ? starts[at] : 0;
    w.ends[q] = !real ? 0 : ends ? ends[at] : causal_end(q0 + q, keys, is_causal);
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
// causal order those up to its own, less what a mask that is the same for all heads excludes.
// Returns 0, the mask left out, where what it allows is not in a row for each query.
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
