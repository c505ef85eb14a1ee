// What all kernels are made of: vectors of float, their exp, matrix products, memory.
#pragma once

#include <ATen/native/CPUBlas.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
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
// Of a score to a threshold, far beyond any of a live model.
constexpr float MAX_DISTANCE = 1e18f;

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
// The same of the first `count` lanes alone; the others are 0. A copy of a constant size is one
// instruction, one of another size a call.
inline Vec load(const float* p, int64_t count) {
  if (count >= LANES) return load(p);
  Vec v{};
  std::memcpy(&v, p, count * sizeof *p);
  return v;
}
inline void store(float* p, Vec v, int64_t count) {
  if (count >= LANES) return store(p, v);
  std::memcpy(p, &v, count * sizeof *p);
}
inline Vec all(float x) { return x - Vec{}; }
// a > b ? a : b, and a < b ? a : b, in one instruction, which compilers do not make of these; where
// either is NaN it is b.
#ifdef __AVX512F__
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
#else
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
#endif
// How far x lies above zero, capped so that its square is finite and an infinite score stays what
// it is.
inline Vec distance(Vec x) { return smaller(larger(x, Vec{}), all(MAX_DISTANCE)); }
// What scores are taken from before exp, given the largest of them: where all are -inf, any finite
// number keeps their exp at 0.
inline Vec base_of(Vec most) { return most == -INFINITE ? Vec{} : most; }
inline double total(Vec v) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// exp for x at or below some 88, within one unit in the last place; below -87 it is 0.
inline Vec exponential(Vec x) {
  const Vec shift = all(12582912.0f);  // 1.5 * 2^23: rounds to an integer, left in the low bits
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  // The polynomial of this form with the least relative error for |r| <= log(2) / 2.
  Vec y = all(1.3814539988e-3f);
  y = y * r + 8.3687451164e-3f;
  y = y * r + 4.1668390787e-2f;
  y = y * r + 1.6666520399e-1f;
  y = y * r + 4.9999993432e-1f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
#ifdef __AVX512F__
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(-87.0f), _CMP_NLT_UQ), y, n);
#else
  const IntVec power = ((IntVec)shifted + 127) << 23;
  return x < all(-87.0f) ? Vec{} : y * (Vec)power;
#endif
}

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

// The same, of a packed B: panels of so many columns, each with its rows one after the other, the
// panel of the columns from n0 on at b + n0 * k. oneDNN's kernels would else wait for rows that lie
// each on another page of memory; MKL packs by itself, and is faster with all columns at once.
inline int64_t panel() { return use_onednn ? 64 : int64_t{1} << 32; }
inline void packed_product(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, float* c,
    int64_t ldc, bool accumulate) {
  for (int64_t n0 = 0; n0 < n; n0 += panel()) {
    const int64_t columns = std::min(panel(), n - n0);
    product(m, columns, k, a, lda, b + n0 * k, columns, c + n0, ldc, accumulate);
  }
}

inline void end_products() {
  if (use_onednn) at::native::cpublas::brgemm_release(false);
}

// C (rows, vectors * LANES) = A B, or added to C, which stays in registers; k is not 0.
template <int rows, int vectors>
inline void product_tile(
    int64_t k, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t ldb,
    float* c, int64_t ldc, bool accumulate) {
  Vec sums[rows][vectors];
  // Compilers keep the sums in registers throughout only if the loops over them are unrolled first,
  // and if the loop over k has a turn at least.
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++)
      sums[r][v] = accumulate ? load(c + r * ldc + v * LANES) : Vec{};
  int64_t i = 0;
  do {
    Vec row[vectors];
    for (int v = 0; v < vectors; v++) row[v] = load(b + i * ldb + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < vectors; v++) sums[r][v] += a[r * a_row + i * a_column] * row[v];
  } while (++i < k);
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) store(c + r * ldc + v * LANES, sums[r][v]);
}

// Vectors of a row of C. With AVX2 4 rows of 3, a row of B and an element of A fill its registers.
constexpr int WIDE = LANES == 8 ? 3 : 4;

// C (m, n) = A (m, k) B (k, n), or added to C, of matrices that are in the cache: m and n are
// multiples of LANES, and A's element (i, j) is a[i * a_row + j * a_column], so that none has to be
// transposed for it. As fast as oneDNN's, less the 0.2 us of a call.
template <int vectors = WIDE>
void small_product(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column,
    const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (k == 0) {
    for (int64_t i = 0; i < m && !accumulate; i++) std::fill_n(c + i * ldc, n, 0.0f);
    return;
  }
  constexpr int64_t width = vectors * LANES, rows = 2 * vectors > WIDE ? 4 : 8;
  for (; n >= width; n -= width, b += width, c += width)
    for (int64_t i = 0; i < m; i += rows)
      product_tile<rows, vectors>(
          k, a + i * a_row, a_row, a_column, b, ldb, c + i * ldc, ldc, accumulate);
  if constexpr (vectors > 1)
    if (n) small_product<vectors - 1>(m, n, k, a, a_row, a_column, b, ldb, c, ldc, accumulate);
}

// Elements of a and b in turn, those from this one on.
template <int64_t from, size_t... i>
inline Vec interleaved(Vec a, Vec b, std::index_sequence<i...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, (from + i / 2 + i % 2 * LANES)...);
#else
  return __builtin_shuffle(a, b, IntVec{(from + i / 2 + i % 2 * LANES)...});
#endif
}

inline IntVec count_from(int64_t first) {
  IntVec numbers;
  for (int32_t i = 0; i < LANES; i++) numbers[i] = i;
  return numbers + static_cast<int32_t>(first);
}

// The lanes joined by an operation, two halves at a time.
template <class Join>
inline float joined(Vec v, Join join) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  for (int64_t n = 1; n < LANES; n *= 2)
    v = join(interleaved<0>(v, v, lanes), interleaved<LANES / 2>(v, v, lanes));
  return v[0];
}
inline float largest(Vec v) { return joined(v, larger); }
inline float sum_of(Vec v) { return joined(v, [](Vec a, Vec b) { return a + b; }); }

// The sums of LANES vectors, which are used up.
inline Vec totals(Vec* parts) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  // Unrolled, so that they stay in registers.
#pragma GCC unroll 4
  for (int64_t n = LANES / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; i++)
      parts[i] = interleaved<0>(parts[i], parts[i + n], lanes) +
                 interleaved<LANES / 2>(parts[i], parts[i + n], lanes);
  return parts[0];
}

// out (LANES, ld) = factor * in (LANES, LANES) transposed.
inline void transpose_tile(
    const float* in, int64_t stride, float* out, int64_t ld, float factor) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  Vec tile[LANES], next[LANES];
  for (int64_t i = 0; i < LANES; i++) tile[i] = factor * load(in + i * stride);
  // Each turn moves the highest bit of an element's place (row, column) behind the others: after
  // as many as a column has bits, row and column have changed places.
  for (int64_t n = 1; n < LANES; n *= 2) {
    for (int64_t i = 0; i < LANES / 2; i++) {
      next[2 * i] = interleaved<0>(tile[i], tile[i + LANES / 2], lanes);
      next[2 * i + 1] = interleaved<LANES / 2>(tile[i], tile[i + LANES / 2], lanes);
    }
    std::copy_n(next, LANES, tile);
  }
  for (int64_t j = 0; j < LANES; j++) store(out + j * ld, tile[j]);
}

// out (columns, ld) = factor * in (rows, columns) transposed.
void transpose(
    const float* in, int64_t stride, int64_t rows, int64_t columns, float* out, int64_t ld,
    float factor = 1) {
  for (int64_t r0 = 0; r0 < rows; r0 += LANES)
    for (int64_t c0 = 0; c0 < columns; c0 += LANES) {
      const int64_t r1 = std::min(r0 + LANES, rows), c1 = std::min(c0 + LANES, columns);
      if (r1 - r0 == LANES && c1 - c0 == LANES) {
        transpose_tile(in + r0 * stride + c0, stride, out + c0 * ld + r0, ld, factor);
        continue;
      }
      for (int64_t r = r0; r < r1; r++)
        for (int64_t c = c0; c < c1; c++) out[c * ld + r] = factor * in[r * stride + c];
    }
}

// out (rows, ld) = factor * in (rows, columns).
void copy(
    const float* in, int64_t stride, int64_t rows, int64_t columns, float* out, int64_t ld,
    float factor = 1) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) out[r * ld + c] = factor * in[r * stride + c];
}

// Asks the system for huge pages behind memory that is new, where it has any: a fault then brings
// 2 MiB rather than 4 KiB.
inline void in_huge_pages(float* memory, int64_t size) {
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory + size) / PAGE * PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
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

// Runs a kernel; 0 if it ran out of memory.
template <class Kernel>
int guarded(Kernel kernel) {
  try {
    kernel();
    return 1;
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

}  // namespace
