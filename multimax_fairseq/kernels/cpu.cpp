// MultiMax for float32 on x86: attention, the output-layer loss, the output layer, the modulator.
//
// Everything is blocked so that a tile of scores is modulated, exponentiated and used in the next
// matrix product while it is in the cache. Tiles are kept transposed, (keys, queries) or (classes,
// tokens): then every statistic of a softmax runs along the vector lanes, and all but one of the
// operands of the matrix products lie in memory as the product wants them.
//
// Sums over many tiles are kept in double. Work is given to threads by index, never by who is
// first, so that a result is the same bit for bit at every run with as many threads.

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <vector>

extern "C" __attribute__((weak)) void sgemm_(
    const char*, const char*, const int*, const int*, const int*, const float*, const float*,
    const int*, const float*, const int*, const float*, float*, const int*);

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t UintVec __attribute__((vector_size(4 * LANES)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline IntVec load(const int32_t* p) {
  IntVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec all(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
// How far x lies above zero, capped far beyond any score of a live model, so that its square is
// finite and an infinite score stays what it is.
inline Vec distance(Vec x) {
  const Vec most = all(1e18f);
  x = larger(x, Vec{});
  return x < most ? x : most;
}
inline double total(Vec v) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// exp for x at or below some 88, within 2 units in the last place; below -87 it is 0.
inline Vec exponential(Vec x) {
  const Vec shift = all(12582912.0f);  // 1.5 * 2^23: rounds to an integer, left in the low bits
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const IntVec power = ((IntVec)shifted + 127) << 23;
  return x < all(-87.0f) ? Vec{} : y * (Vec)power;
}

// The columns of a parameter table.
enum { LOW_C1, LOW_C2, LOW_T1, LOW_T2, HIGH_C1, HIGH_C2, HIGH_T1, HIGH_T2, COLUMNS };

// What the gradients of the parameters are formed from: sums of the incoming gradient times
// (is below, distance, distance^2), for each threshold where it is needed.
struct Sums {
  Vec low_is{}, low_1{}, low_2{}, low_22{}, high_is{}, high_1{}, high_2{}, high_22{};
};

struct NoModulator {
  explicit NoModulator(const float*) {}
  Vec value(Vec x) const { return x; }
  Vec backward(Vec, Vec grad, Sums&) const { return grad; }
  void add(const Sums&, double*) const {}
};

struct Modulator {
  float p[COLUMNS];
  explicit Modulator(const float* table) { std::copy(table, table + COLUMNS, p); }

  Vec value(Vec x) const {
    const Vec low_1 = distance(p[LOW_T1] - x), low_2 = distance(p[LOW_T2] - x);
    const Vec high_1 = distance(x - p[HIGH_T1]), high_2 = distance(x - p[HIGH_T2]);
    return x + p[LOW_C1] * low_1 + p[LOW_C2] * low_2 * low_2 + p[HIGH_C1] * high_1 +
           p[HIGH_C2] * high_2 * high_2;
  }

  // The gradient by x, given that by value(x); the parameters' share is added to sums.
  Vec backward(Vec x, Vec grad, Sums& sums) const {
    const Vec low_1 = distance(p[LOW_T1] - x), low_2 = distance(p[LOW_T2] - x);
    const Vec high_1 = distance(x - p[HIGH_T1]), high_2 = distance(x - p[HIGH_T2]);
    const Vec low_is = low_1 > Vec{} ? grad : Vec{}, high_is = high_1 > Vec{} ? grad : Vec{};
    const Vec low_g = grad * low_2, high_g = grad * high_2;
    sums.low_is += low_is;
    sums.low_1 += grad * low_1;
    sums.low_2 += low_g;
    sums.low_22 += low_g * low_2;
    sums.high_is += high_is;
    sums.high_1 += grad * high_1;
    sums.high_2 += high_g;
    sums.high_22 += high_g * high_2;
    return grad - p[LOW_C1] * low_is - 2 * p[LOW_C2] * low_g + p[HIGH_C1] * high_is +
           2 * p[HIGH_C2] * high_g;
  }

  void add(const Sums& s, double* out) const {
    out[LOW_C1] += total(s.low_1);
    out[LOW_C2] += total(s.low_22);
    out[LOW_T1] += p[LOW_C1] * total(s.low_is);
    out[LOW_T2] += 2 * p[LOW_C2] * total(s.low_2);
    out[HIGH_C1] += total(s.high_1);
    out[HIGH_C2] += total(s.high_22);
    out[HIGH_T1] -= p[HIGH_C1] * total(s.high_is);
    out[HIGH_T2] -= 2 * p[HIGH_C2] * total(s.high_2);
  }
};

// C (m, n) = A (m, k) B (k, n), or added to C; all row-major.
// oneDNN's kernels where the processor has AVX-512, which are about twice as fast as MKL on AMD.
bool use_onednn = false;

inline void product(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
    float* c, int64_t ldc, bool accumulate) {
  if (use_onednn) {
    at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, false);
    return;
  }
  const int M = n, N = m, K = k, A = ldb, B = lda, C = ldc;
  const float one = 1, beta = accumulate;
  sgemm_("N", "N", &M, &N, &K, &one, b, &A, a, &B, &beta, c, &C);
}

inline void end_products() {
  if (use_onednn) at::native::cpublas::brgemm_release(false);
}

// out (columns, ld) = factor * in (rows, columns) transposed.
void transpose(
    const float* in, int64_t stride, int64_t rows, int64_t columns, float* out, int64_t ld,
    float factor = 1) {
  for (int64_t r0 = 0; r0 < rows; r0 += LANES)
    for (int64_t c0 = 0; c0 < columns; c0 += LANES) {
      const int64_t r1 = std::min(r0 + LANES, rows), c1 = std::min(c0 + LANES, columns);
      if (r1 - r0 == LANES && c1 - c0 == LANES) {
        float tile[LANES][LANES];
        for (int64_t i = 0; i < LANES; i++)
          for (int64_t j = 0; j < LANES; j++) tile[j][i] = factor * in[(r0 + i) * stride + c0 + j];
        for (int64_t j = 0; j < LANES; j++)
          std::memcpy(out + (c0 + j) * ld + r0, tile[j], sizeof tile[j]);
        continue;
      }
      for (int64_t r = r0; r < r1; r++)
        for (int64_t c = c0; c < c1; c++) out[c * ld + r] = factor * in[r * stride + c];
    }
}

void copy(
    const float* in, int64_t stride, int64_t rows, int64_t columns, float* out, float factor = 1) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) out[r * columns + c] = factor * in[r * stride + c];
}

// Scratch memory on a cache line; not cleared.
struct Buffer {
  std::unique_ptr<float, void (*)(void*)> memory;
  explicit Buffer(int64_t size)
      : memory(static_cast<float*>(std::aligned_alloc(64, padded(std::max<int64_t>(size, 1)) * 4)),
               std::free) {
    if (!memory) throw std::bad_alloc();
  }
  operator float*() const { return memory.get(); }
};

}  // namespace

// ---------------------------------------------------------------------------------- attention

struct Tensor4 {  // (batch, heads, length, size), the last dimension dense
  float* data;
  int64_t batch, head, row;
  float* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Attention {
  int64_t batch, heads, queries, keys, size, threads;
  float scale, dropout;  // dropout: the probability of dropping
  uint64_t seed;
  // Query t of sentence b may attend to keys starts[b, t] <= s < ends[b, t]; null: to all.
  const int32_t *starts, *ends;
  const float* table;  // (heads, COLUMNS), or null
  float* statistics;   // (batch, heads, 2, queries): the largest score, 1 / sum of exp; or null
  double* grad_table;  // (batch, heads, COLUMNS), or null
  Tensor4 query, key, value, output, grad_output, grad_query, grad_key, grad_value;

  template <class Sigma>
  Sigma sigma(int64_t h) const {
    return Sigma(table ? table + h * COLUMNS : nullptr);
  }
};

namespace {

constexpr int64_t QUERIES = 64;  // a block; with KEYS rows of it the tiles stay in the L2 cache
constexpr int64_t KEYS = 512, KEYS_BACKWARD = 64;
constexpr int64_t FEW_QUERIES = 8;

// The keys that a block of queries may attend to.
struct Window {
  alignas(64) int32_t starts[QUERIES], ends[QUERIES];
  int64_t first, last;            // the union over the queries: first <= s < last
  int64_t common_first, common_last;  // what all of them may attend to
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

template <class Sigma>
void forward_head(const Attention& a, int64_t b, int64_t h, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size;
  const Sigma sigma = a.sigma<Sigma>(h);
  const Dropout dropout(a, bh);
  float* key = scratch;                     // (keys, size)
  float* value = key + keys * size;         // (size, keys)
  float* query = value + keys * size;       // (size, QUERIES), scaled
  float* output = query + size * QUERIES;   // (size, QUERIES)
  float* scores = output + size * QUERIES;  // (KEYS, QUERIES)
  std::fill(key, query, 0.0f);
  copy(a.key.at(b, h), a.key.row, a.keys, size, key);
  transpose(a.value.at(b, h), a.value.row, a.keys, size, value, keys);

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a, b, q0, count);
    std::fill(query, query + size * QUERIES, 0.0f);
    transpose(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, QUERIES,
              a.scale);
    std::fill(output, output + size * QUERIES, 0.0f);
    alignas(64) float top[QUERIES], sum[QUERIES], shrink[QUERIES];
    std::fill(top, top + QUERIES, -INFINITE);
    std::fill(sum, sum + QUERIES, 0.0f);
    const int64_t first = w.first / LANES * LANES;
    for (int64_t s0 = first; s0 < w.last; s0 += KEYS) {
      const int64_t s1 = std::min(s0 + KEYS, padded(w.last)), rows = s1 - s0;
      product(rows, width, size, key + s0 * size, size, query, QUERIES, scores, QUERIES, false);
      for (int64_t q = 0; q < width; q += LANES) {
        Vec most = load(top + q);
        for (int64_t s = s0; s < s1; s++) {
          float* at = scores + (s - s0) * QUERIES + q;
          Vec z = sigma.value(load(at));
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
        for (int64_t s = s0; s < s1; s++) {
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
        for (int64_t d = 0; d < size; d++)
          for (int64_t q = 0; q < width; q += LANES) {
            float* at = output + d * QUERIES + q;
            store(at, load(at) * load(shrink + q));
          }
      product(size, width, rows, value + s0, keys, scores, QUERIES, output, QUERIES, true);
    }
    float inverse[QUERIES];
    for (int64_t q = 0; q < count; q++) {
      inverse[q] = sum[q] > 0 ? 1 / sum[q] : 0;
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
  return 2 * padded(a.keys) * a.size + 2 * a.size * QUERIES + KEYS * QUERIES;
}

// Decoding: too few queries to fill a tile. Keys are read where they are.
template <class Sigma>
void forward_few(const Attention& a, int64_t b, int64_t h, float* scratch) {
  const int64_t size = a.size, length = padded(a.keys);
  const Sigma sigma = a.sigma<Sigma>(h);
  for (int64_t t = 0; t < a.queries; t++) {
    const int64_t at = b * a.queries + t;
    const int64_t first = a.starts ? a.starts[at] : 0, last = a.ends ? a.ends[at] : a.keys;
    const float* query = a.query.at(b, h) + t * a.query.row;
    const float* key = a.key.at(b, h);
    const float* value = a.value.at(b, h);
    float* out = a.output.at(b, h) + t * a.output.row;
    std::fill(scratch, scratch + length, -INFINITE);
    for (int64_t s = first; s < last; s++) {
      Vec sum{};
      for (int64_t d = 0; d < size; d += LANES)
        sum += load(query + d) * load(key + s * a.key.row + d);
      float score = 0;
      for (int i = 0; i < LANES; i++) score += sum[i];
      scratch[s] = a.scale * score;
    }
    Vec most = all(-INFINITE);
    for (int64_t s = 0; s < length; s += LANES) {
      const Vec x = load(scratch + s);
      const Vec z = x == -INFINITE ? x : sigma.value(x);
      store(scratch + s, z);
      most = larger(most, z);
    }
    float top = -INFINITE;
    for (int i = 0; i < LANES; i++) top = std::max(top, most[i]);
    Vec sums{};
    for (int64_t s = 0; s < length; s += LANES) {
      const Vec p = exponential(load(scratch + s) - (top == -INFINITE ? 0 : top));
      store(scratch + s, p);
      sums += p;
    }
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    const float inverse = sum > 0 ? 1 / sum : 0;
    for (int64_t d = 0; d < size; d += LANES) {
      Vec result{};
      for (int64_t s = first; s < last; s++)
        result += scratch[s] * load(value + s * a.value.row + d);
      store(out + d, result * inverse);
    }
  }
}

template <class Sigma>
void backward_head(const Attention& a, int64_t b, int64_t h, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size;
  const Sigma sigma = a.sigma<Sigma>(h);
  const Dropout dropout(a, bh);
  float* key = scratch;                        // (keys, size)
  float* key_t = key + keys * size;            // (size, keys)
  float* value = key_t + keys * size;          // (keys, size)
  float* grad_key = value + keys * size;       // (keys, size)
  float* grad_value = grad_key + keys * size;  // (keys, size)
  float* query = grad_value + keys * size;     // (QUERIES, size), scaled
  float* query_t = query + size * QUERIES;     // (size, QUERIES)
  float* grad_output = query_t + size * QUERIES;            // (QUERIES, size)
  float* grad_output_t = grad_output + size * QUERIES;      // (size, QUERIES)
  float* grad_query_t = grad_output_t + size * QUERIES;     // (size, QUERIES)
  float* scores = grad_query_t + size * QUERIES;            // (keys, QUERIES), then their gradients
  float* probs = scores + keys * QUERIES;                   // (keys, QUERIES)
  float* grad_probs = probs + keys * QUERIES;               // (keys, QUERIES)
  std::fill(key, query, 0.0f);
  copy(a.key.at(b, h), a.key.row, a.keys, size, key);
  transpose(a.key.at(b, h), a.key.row, a.keys, size, key_t, keys);
  copy(a.value.at(b, h), a.value.row, a.keys, size, value);

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a, b, q0, count);
    const int64_t first = w.first / LANES * LANES, last = padded(w.last);
    std::fill(query, scores, 0.0f);
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
    for (int64_t s0 = first; s0 < last; s0 += KEYS_BACKWARD) {
      const int64_t s1 = std::min(s0 + KEYS_BACKWARD, last), rows = s1 - s0;
      product(rows, width, size, key + s0 * size, size, query_t, QUERIES, scores + s0 * QUERIES,
              QUERIES, false);
      product(rows, width, size, value + s0 * size, size, grad_output_t, QUERIES,
              grad_probs + s0 * QUERIES, QUERIES, false);
      for (int64_t q = 0; q < width; q += LANES) {
        const Vec top = load(tops + q), inverse = load(inverses + q);
        Vec mean{};
        for (int64_t s = s0; s < s1; s++) {
          const int64_t at = s * QUERIES + q;
          Vec p = exponential(sigma.value(load(scores + at)) - top) * inverse;
          if (s < w.common_first || s >= w.common_last) p = may_attend(w, q, s) ? p : Vec{};
          if (a.dropout > 0)
            store(grad_probs + at,
                  load(grad_probs + at) * dropout.keep(dropout.key(s), q0 + q));
          mean += p * load(grad_probs + at);
          store(probs + at, p);
        }
        store(means + q, load(means + q) + mean);
      }
    }
    for (int64_t s0 = first; s0 < last; s0 += KEYS_BACKWARD) {
      const int64_t s1 = std::min(s0 + KEYS_BACKWARD, last), rows = s1 - s0;
      Sums sums;
      for (int64_t q = 0; q < width; q += LANES) {
        const Vec mean = load(means + q);
        for (int64_t s = s0; s < s1; s++) {
          const int64_t at = s * QUERIES + q;
          const Vec p = load(probs + at), grad = p * (load(grad_probs + at) - mean);
          store(scores + at, sigma.backward(load(scores + at), grad, sums));
          if (a.dropout > 0) store(probs + at, p * dropout.keep(dropout.key(s), q0 + q));
        }
      }
      if (a.grad_table) sigma.add(sums, a.grad_table + bh * COLUMNS);
      product(rows, size, width, probs + s0 * QUERIES, QUERIES, grad_output, size,
              grad_value + s0 * size, size, true);
      product(rows, size, width, scores + s0 * QUERIES, QUERIES, query, size,
              grad_key + s0 * size, size, true);
      product(size, width, rows, key_t + s0, keys, scores + s0 * QUERIES, QUERIES, grad_query_t,
              QUERIES, true);
    }
    transpose(grad_query_t, QUERIES, size, count, a.grad_query.at(b, h) + q0 * a.grad_query.row,
              a.grad_query.row, a.scale);
  }
  for (int64_t s = 0; s < a.keys; s++) {
    std::copy_n(grad_key + s * size, size, a.grad_key.at(b, h) + s * a.grad_key.row);
    std::copy_n(grad_value + s * size, size, a.grad_value.at(b, h) + s * a.grad_value.row);
  }
}

int64_t backward_scratch(const Attention& a) {
  return padded(a.keys) * (5 * a.size + 3 * QUERIES) + 5 * a.size * QUERIES;
}

template <class Head>
void every_head(const Attention& a, int64_t scratch_size, Head head) {
  const int64_t heads = a.batch * a.heads;
#pragma omp parallel num_threads(std::min(a.threads, heads))
  {
    const Buffer scratch(scratch_size);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < heads; i++) head(a, i / a.heads, i % a.heads, scratch);
    end_products();
  }
}

}  // namespace

extern "C" void attention_forward(const Attention* attention) {
  const Attention& a = *attention;
  // The backward pass wants statistics of the very scores that it forms.
  if (a.queries <= FEW_QUERIES && a.size % LANES == 0 && a.dropout == 0 && !a.statistics)
    every_head(a, padded(a.keys), a.table ? forward_few<Modulator> : forward_few<NoModulator>);
  else
    every_head(a, forward_scratch(a), a.table ? forward_head<Modulator> : forward_head<NoModulator>);
}

extern "C" void attention_backward(const Attention* attention) {
  const Attention& a = *attention;
  every_head(a, backward_scratch(a), a.table ? backward_head<Modulator> : backward_head<NoModulator>);
}

struct Mask {
  const void* data;  // (batch, queries, keys) with any strides, of bool, or of float if is_float
  int64_t is_float, allows;  // whether true means: may attend
  float threshold;           // a float at or below it excludes
  int64_t batch, queries, keys, strides[3];
};

namespace {

// The keys that a row of a mask allows, start <= s < end; false if they are not in a row, or if a
// float both allows and is not 0.
bool read_row(const Mask& mask, int64_t at, uint8_t* allowed, int32_t* start, int32_t* end) {
  bool odd = false;
  for (int64_t s = 0; s < mask.keys; s++) {
    const int64_t i = at + s * mask.strides[2];
    if (mask.is_float) {
      const float x = static_cast<const float*>(mask.data)[i];
      allowed[s] = !(x <= mask.threshold);
      odd |= allowed[s] && x != 0;
    } else {
      allowed[s] = static_cast<const uint8_t*>(mask.data)[i] == (mask.allows != 0);
    }
  }
  const uint8_t* stop = allowed + mask.keys;
  const uint8_t* first = std::find(allowed, const_cast<uint8_t*>(stop), 1);
  const uint8_t* last = std::find(first, stop, 0);
  *start = first - allowed, *end = first == stop ? *start : last - allowed;
  return !odd && std::find(last, stop, 1) == stop;
}

}  // namespace

// Narrows the window of keys of each query, starts and ends (batch, queries), to what a mask
// allows. Returns 0, the windows half narrowed, where a mask is not a window for each query.
extern "C" int narrow_windows(const Mask* m, int32_t* starts, int32_t* ends) {
  std::vector<uint8_t> allowed(m->keys);
  std::vector<int32_t> rows(2 * m->queries);
  for (int64_t b = 0; b < m->batch; b++)
    for (int64_t t = 0; t < m->queries; t++) {
      int32_t* row = &rows[2 * t];
      const bool known = (b && !m->strides[0]) || (t && !m->strides[1]);
      if (!known) {
        const int64_t at = b * m->strides[0] + t * m->strides[1];
        if (!read_row(*m, at, allowed.data(), row, row + 1)) return 0;
      } else if (t && !m->strides[1]) {
        std::copy_n(row - 2, 2, row);
      }
      int32_t& start = starts[b * m->queries + t];
      int32_t& end = ends[b * m->queries + t];
      start = std::max(start, row[0]), end = std::max(start, std::min(end, row[1]));
    }
  return 1;
}

// ------------------------------------------------------------------------- output-layer loss

struct OutputLoss {
  int64_t tokens, classes, size, chunk, threads;
  // The gradient by z[k] is factors[token] * (p[k] - share - hit * [k is target]).
  float share, hit;
  const float *features, *weight, *bias;  // (tokens, size), (classes, size), (classes) or null
  const float* table;                     // (COLUMNS), or null
  const int64_t* target;                  // (tokens); a negative one is ignored
  const float* factors;                   // (tokens); null for no gradients
  double *nll, *smooth;  // (tokens): log sum exp z - z[target], and sum_k (log sum exp z - z[k])
  float *grad_features, *grad_weight, *grad_bias;  // each may be null
  double* grad_table;                              // (COLUMNS)
};

namespace {

constexpr int64_t CLASSES = 128;  // a tile

// What a chunk of tokens needs to know of itself, and what the threads find out about it.
struct Chunk {
  int64_t count, width;
  const int64_t* rows;             // which tokens
  Buffer features, features_t;     // (width, size), (size, width)
  Buffer logits;                   // (classes, width), not modulated
  Buffer tops, inverses, factors;  // (width)
};

// The statistics of a column of modulated logits, relative to their largest.
struct Column {
  float top = -INFINITE;
  double sum = 0, sum_z = 0, target_z = 0;
  void join(float other_top, double other_sum) {
    if (other_top > top) std::swap(top, other_top), std::swap(sum, other_sum);
    // -inf - -inf is NaN where there is nothing yet; a NaN among the logits has to stay one.
    if (other_sum != 0) sum += other_sum * std::exp(double(other_top) - top);
  }
};

template <class Sigma>
void tile_statistics(const OutputLoss& a, Chunk& c, int64_t v0, int64_t rows, Column* columns) {
  const Sigma sigma(a.table);
  float* logits = c.logits + v0 * c.width;
  product(rows, c.width, a.size, a.weight + v0 * a.size, a.size, c.features_t, c.width, logits,
          c.width, false);
  for (int64_t q = 0; q < c.width; q += LANES) {
    Vec most = all(-INFINITE), sum_z{};
    for (int64_t v = 0; v < rows; v++) {
      float* at = logits + v * c.width + q;
      if (a.bias) store(at, load(at) + a.bias[v0 + v]);
      const Vec z = sigma.value(load(at));
      most = larger(most, z);
      sum_z += z;
    }
    Vec sum{};
    for (int64_t v = 0; v < rows; v++)
      sum += exponential(sigma.value(load(logits + v * c.width + q)) - most);
    for (int64_t i = 0; i < LANES; i++) {
      columns[q + i].join(most[i], sum[i]);
      columns[q + i].sum_z += sum_z[i];
    }
  }
  for (int64_t q = 0; q < c.count; q++) {
    const int64_t v = a.target[c.rows[q]] - v0;
    if (v >= 0 && v < rows) columns[q].target_z = sigma.value(all(logits[v * c.width + q]))[0];
  }
}

// Turns a tile of logits into the gradients by them, and adds what the tile gives to the others.
template <class Sigma>
void tile_gradients(
    const OutputLoss& a, Chunk& c, int64_t v0, int64_t rows, bool first, float* transposed,
    float* grad_features, double* grad_table) {
  const Sigma sigma(a.table);
  float* logits = c.logits + v0 * c.width;
  Sums sums;
  Buffer at_target(c.width);
  for (int64_t q = 0; q < c.count; q++) {
    const int64_t v = a.target[c.rows[q]] - v0;
    if (v >= 0 && v < rows) at_target[q] = logits[v * c.width + q];
  }
  for (int64_t q = 0; q < c.width; q += LANES) {
    const Vec top = load(c.tops + q), inverse = load(c.inverses + q), factor = load(c.factors + q);
    for (int64_t v = 0; v < rows; v++) {
      float* at = logits + v * c.width + q;
      const Vec x = load(at);
      const Vec p = exponential(sigma.value(x) - top) * inverse;
      store(at, sigma.backward(x, factor * (p - a.share), sums));
    }
  }
  for (int64_t q = 0; q < c.count; q++) {
    const int64_t v = a.target[c.rows[q]] - v0;
    if (v < 0 || v >= rows) continue;
    Vec grad{};
    grad[0] = -a.hit * c.factors[q];
    logits[v * c.width + q] += sigma.backward(all(at_target[q]), grad, sums)[0];
  }
  sigma.add(sums, grad_table);
  if (a.grad_bias)
    for (int64_t v = 0; v < rows; v++) {
      Vec sum{};
      for (int64_t q = 0; q < c.width; q += LANES) sum += load(logits + v * c.width + q);
      a.grad_bias[v0 + v] = (first ? 0 : a.grad_bias[v0 + v]) + total(sum);
    }
  if (a.grad_weight)
    product(rows, a.size, c.width, logits, c.width, c.features, a.size,
            a.grad_weight + v0 * a.size, a.size, !first);
  if (grad_features) {
    transpose(logits, c.width, rows, c.width, transposed, CLASSES);
    product(c.width, a.size, rows, transposed, CLASSES, a.weight + v0 * a.size, a.size,
            grad_features, a.size, true);
  }
}

template <class Sigma>
void output_loss_chunk(const OutputLoss& a, Chunk& c, bool first) {
  const int64_t tiles = (a.classes + CLASSES - 1) / CLASSES;
  const int64_t threads = std::min(a.threads, tiles);
  std::fill(c.features + 0, c.features + c.width * a.size, 0.0f);
  for (int64_t q = 0; q < c.count; q++)
    std::copy_n(a.features + c.rows[q] * a.size, a.size, c.features + q * a.size);
  transpose(c.features, a.size, c.width, a.size, c.features_t, c.width);

  std::vector<Column> columns(threads * c.width);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++) {
    for (int64_t t = tiles * i / threads; t < tiles * (i + 1) / threads; t++)
      tile_statistics<Sigma>(a, c, t * CLASSES, std::min(CLASSES, a.classes - t * CLASSES),
                             &columns[i * c.width]);
    end_products();
  }
  for (int64_t q = 0; q < c.width; q++) {
    Column all = columns[q];
    for (int64_t i = 1; i < threads; i++) {
      const Column& part = columns[i * c.width + q];
      all.join(part.top, part.sum);
      all.sum_z += part.sum_z, all.target_z += part.target_z;
    }
    c.tops[q] = all.top, c.inverses[q] = 1 / all.sum, c.factors[q] = 0;
    if (q >= c.count) continue;
    const double log_total = all.top + std::log(all.sum);
    a.nll[c.rows[q]] = log_total - all.target_z;
    a.smooth[c.rows[q]] = a.classes * log_total - all.sum_z;
    if (a.factors) c.factors[q] = a.factors[c.rows[q]];
  }
  if (!a.factors) return;

  const int64_t features = a.grad_features ? c.width * a.size : 0;
  const Buffer grad_features(threads * features);
  std::fill(grad_features + 0, grad_features + threads * features, 0.0f);
  std::vector<double> grad_tables(threads * COLUMNS);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++) {
    const Buffer transposed(c.width * CLASSES);
    for (int64_t t = tiles * i / threads; t < tiles * (i + 1) / threads; t++)
      tile_gradients<Sigma>(a, c, t * CLASSES, std::min(CLASSES, a.classes - t * CLASSES), first,
                            transposed, features ? grad_features + i * features : nullptr,
                            &grad_tables[i * COLUMNS]);
    end_products();
  }
  for (int64_t i = 0; i < threads; i++) {
    for (int j = 0; j < COLUMNS; j++) a.grad_table[j] += grad_tables[i * COLUMNS + j];
    for (int64_t q = 0; features && q < c.count; q++) {
      float* out = a.grad_features + c.rows[q] * a.size;
      const float* part = grad_features + i * features + q * a.size;
      for (int64_t d = 0; d < a.size; d++) out[d] = (i ? out[d] : 0) + part[d];
    }
  }
}

}  // namespace

extern "C" void output_loss(const OutputLoss* loss) {
  const OutputLoss& a = *loss;
  std::vector<int64_t> rows;
  for (int64_t n = 0; n < a.tokens; n++) {
    if (a.target[n] >= 0) {
      rows.push_back(n);
      continue;
    }
    a.nll[n] = a.smooth[n] = 0;
    if (a.grad_features) std::fill_n(a.grad_features + n * a.size, a.size, 0.0f);
  }
  const int64_t tokens = rows.size();
  if (!tokens) {
    if (a.grad_weight) std::fill_n(a.grad_weight, a.classes * a.size, 0.0f);
    if (a.grad_bias) std::fill_n(a.grad_bias, a.classes, 0.0f);
    return;
  }
  const int64_t most = padded(std::min(a.chunk, tokens));
  Chunk c{0, 0, nullptr, Buffer(most * a.size), Buffer(most * a.size), Buffer(most * a.classes),
          Buffer(most), Buffer(most), Buffer(most)};
  for (int64_t n = 0; n < tokens; n += a.chunk) {
    c.count = std::min(a.chunk, tokens - n), c.width = padded(c.count), c.rows = &rows[n];
    (a.table ? output_loss_chunk<Modulator> : output_loss_chunk<NoModulator>)(a, c, n == 0);
  }
}

// ------------------------------------------------------------------------ the modulator alone

struct Modulation {
  int64_t count, inner, heads, threads;  // scores, dense; inner of them a head, in turn
  const float* table;                    // (heads, COLUMNS)
  const float *scores, *grad;            // grad is null for the values
  float* out;                            // the modulated scores, or the gradient by scores
  double* grad_table;                    // (count / inner rounded up, COLUMNS)
};

extern "C" void modulation(const Modulation* modulation) {
  const Modulation& m = *modulation;
  const int64_t pieces = (m.count + m.inner - 1) / m.inner;
#pragma omp parallel for num_threads(std::min(m.threads, pieces)) schedule(static)
  for (int64_t i = 0; i < pieces; i++) {
    const Modulator sigma(m.table + i % m.heads * COLUMNS);
    double grads[COLUMNS] = {};
    constexpr int64_t BLOCK = 64 * LANES;
    const int64_t end = std::min((i + 1) * m.inner, m.count);
    for (int64_t j0 = i * m.inner; j0 < end; j0 += BLOCK) {
      const int64_t j1 = std::min(j0 + BLOCK, end);
      Sums sums;
      for (int64_t j = j0; j < j1; j += LANES) {
        const int64_t bytes = std::min(LANES, j1 - j) * 4;
        Vec x{}, grad{};
        std::memcpy(&x, m.scores + j, bytes);
        if (m.grad) std::memcpy(&grad, m.grad + j, bytes);
        const Vec out = m.grad ? sigma.backward(x, grad, sums) : sigma.value(x);
        std::memcpy(m.out + j, &out, bytes);
      }
      if (m.grad) sigma.add(sums, grads);
    }
    if (m.grad) std::copy_n(grads, COLUMNS, m.grad_table + i * COLUMNS);
  }
}

// ------------------------------------------------------------- the output layer, to decode with

struct Projection {
  int64_t tokens, classes, size, threads;
  const float *features, *weight, *bias;  // (tokens, size), (classes, size), (classes) or null
  const float* table;                     // (COLUMNS), or null
  float* out;                             // (tokens, classes), modulated
};

namespace {

template <class Sigma>
void project(const Projection& a) {
  const Sigma sigma(a.table);
  const int64_t tiles = (a.classes + CLASSES - 1) / CLASSES;
#pragma omp parallel num_threads(std::min(a.threads, tiles))
  {
    const Buffer weight(a.size * CLASSES);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t v0 = t * CLASSES, count = std::min(CLASSES, a.classes - v0);
      transpose(a.weight + v0 * a.size, a.size, count, a.size, weight, CLASSES);
      for (int64_t n = 0; n < a.tokens; n += QUERIES) {
        const int64_t rows = std::min(QUERIES, a.tokens - n);
        float* out = a.out + n * a.classes + v0;
        product(rows, count, a.size, a.features + n * a.size, a.size, weight, CLASSES, out,
                a.classes, false);
        if (!a.bias && !a.table) continue;
        for (int64_t r = 0; r < rows; r++)
          for (int64_t v = 0; v < count; v += LANES) {
            const int64_t bytes = std::min(LANES, count - v) * 4;
            float* at = out + r * a.classes + v;
            Vec x{}, bias{};
            std::memcpy(&x, at, bytes);
            if (a.bias) std::memcpy(&bias, a.bias + v0 + v, bytes);
            x = sigma.value(x + bias);
            std::memcpy(at, &x, bytes);
          }
      }
    }
    end_products();
  }
}

}  // namespace

extern "C" void projection(const Projection* projection) {
  (projection->table ? project<Modulator> : project<NoModulator>)(*projection);
}

// ------------------------------------------------------------------------------------- start

// Whether matrix products can be had; asked once, before anything else.
extern "C" int start(int onednn) {
  use_onednn = onednn != 0;
  if (!use_onednn) return sgemm_ != nullptr;
  const float one = 1;
  float out = 0;
  try {
    product(1, 1, 1, &one, 1, &one, 1, &out, 1, false);
    end_products();
  } catch (const std::exception&) {
    return 0;
  }
  return out == 1;
}
