// Building blocks of all kernels: SIMD vectors, exp, matrix products, transposes, scratch memory.
#pragma once

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

#ifdef __GLIBC__
// The versions of glibc 2.29 equal these, which every glibc has.
asm(".symver exp, exp@GLIBC_2.2.5");
asm(".symver log, log@GLIBC_2.2.5");
#endif

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
constexpr float INFINITE = std::numeric_limits<float>::infinity();
// Cap for the distance between a score and a threshold; real scores stay far below it.
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
// Partial versions: they access only the first `count` lanes, and load sets the other lanes to 0.
// Full vectors return early because memcpy with a constant size compiles to one instruction.
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
inline Vec broadcast(float x) { return x - Vec{}; }
// a > b ? a : b and a < b ? a : b. Both return b if either input is NaN. Compilers do not turn the
// conditional expressions into one instruction, so intrinsics are used.
#ifdef __AVX512F__
inline Vec vec_max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vec_min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
#else
inline Vec vec_max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec vec_min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
#endif
// max(x, 0), capped so that its square stays finite. An infinite score then gives an infinite
// sigma, not NaN.
inline Vec distance(Vec x) { return vec_min(vec_max(x, Vec{}), broadcast(MAX_DISTANCE)); }
// The value to subtract from scores before exp, given their maximum. If all scores are -inf, a
// finite shift keeps their exp at 0; -inf - (-inf) would be NaN.
inline Vec exp_shift(Vec maximum) { return maximum == -INFINITE ? Vec{} : maximum; }
inline double sum_lanes_double(Vec v) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// exp(x) for x up to about 88, with an error of at most one ulp. Returns 0 for x < -87.
inline Vec exponential(Vec x) {
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const Vec shift = broadcast(12582912.0f);
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  // Minimax polynomial: the smallest relative error for |r| <= log(2) / 2.
  Vec y = broadcast(1.3814539988e-3f);
  y = y * r + 8.3687451164e-3f;
  y = y * r + 4.1668390787e-2f;
  y = y * r + 1.6666520399e-1f;
  y = y * r + 4.9999993432e-1f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
#ifdef __AVX512F__
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-87.0f), _CMP_NLT_UQ), y, n);
#else
  const IntVec power = ((IntVec)shifted + 127) << 23;
  return x < broadcast(-87.0f) ? Vec{} : y * (Vec)power;
#endif
}

// exp(x) - 1 for x up to about 88.
inline Vec exponential_minus_one(Vec x) {
  // The Taylor series where the difference would cancel.
  Vec y = broadcast(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f}) y = y * x + c;
  return (x > -0.35f) & (x < 0.35f) ? x * y : exponential(x) - 1.0f;
}

// Returns x. The compiler cannot fuse its product with a later sum, so every pass rounds x alike.
inline Vec rounded(Vec x) {
  asm("" : "+x"(x));
  return x;
}

// tanh(x) with a relative error of at most 3.3e-7.
inline Vec hyperbolic_tangent(Vec x) {
  // Minimax rational function x P(x^2) / Q(x^2): the smallest relative error for |x| <= 8.2. All
  // coefficients are positive, so nothing cancels. Beyond 8 the result is exactly 1 or -1, because
  // a gradient multiplies 1 - tanh(x)^2 by x.
  const Vec u = vec_max(broadcast(-8), vec_min(broadcast(8), x)), square = u * u;
  Vec p = broadcast(1.133292627e-8f), q = broadcast(6.979453411e-7f);
  for (const float c : {1.924678608e-5f, 3.416145013e-3f, 1.331508038e-1f, 9.999999511e-1f})
    p = p * square + c;
  for (const float c : {3.153495514e-4f, 2.557775049e-2f, 4.664839744e-1f, 1.0f})
    q = q * square + c;
  return u == x ? u * p / q : u / 8;
}

// Matrix products of torch, for `start` of cpu.cpp to set. The library does not link to torch, so
// one build serves every version.
using Brgemm = void (*)(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const float*, const float*, float*,
    bool);
using BrgemmRelease = void (*)(bool);
using Sgemm = void (*)(
    const char*, const char*, const int*, const int*, const int*, const float*, const float*,
    const int*, const float*, const int*, const float*, float*, const int*);
Brgemm brgemm = nullptr;  // oneDNN's; null: use `sgemm`
BrgemmRelease brgemm_release = nullptr;
Sgemm sgemm = nullptr;

// C (m, n) = A (m, k) B (k, n), or C += A B if `accumulate`. All matrices are row-major.
inline void product(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb,
    float* c, int64_t ldc, bool accumulate) {
  if (brgemm) return brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, false);
  const int M = n, N = m, K = k, A = ldb, B = lda, C = ldc;
  const float one = 1, beta = accumulate;
  sgemm("N", "N", &M, &N, &K, &one, b, &A, a, &B, &beta, c, &C);
}

// The number of columns in a panel of a packed matrix. Packing keeps the rows of a panel adjacent.
// Otherwise each row of B may lie on another memory page, which stalls oneDNN's kernels. MKL packs
// B itself and is faster with all columns in one panel.
inline int64_t panel_width() { return brgemm ? 64 : int64_t{1} << 32; }

// `product` for a packed B (k, n): B is stored as panels of panel_width() columns, and each panel
// is a dense row-major matrix. The panel that starts with column n0 begins at b + n0 * k.
inline void packed_product(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, float* c,
    int64_t ldc, bool accumulate) {
  for (int64_t n0 = 0; n0 < n; n0 += panel_width()) {
    const int64_t columns = std::min(panel_width(), n - n0);
    product(m, columns, k, a, lda, b + n0 * k, columns, c + n0, ldc, accumulate);
  }
}

// Releases the per-thread state of oneDNN's kernels.
inline void release_products() {
  if (brgemm) brgemm_release(false);
}

// C (rows, vectors * LANES) = A B, or C += A B if `accumulate`. C stays in registers. k is
// positive.
template <int rows, int vectors>
inline void product_tile(
    int64_t k, const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t ldb,
    float* c, int64_t ldc, bool accumulate) {
  Vec sums[rows][vectors];
  // Compilers keep `sums` in registers only if these loops are unrolled and if the loop over k runs
  // at least once, hence the pragmas and the do-while loop.
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

// Vectors in a row of a tile of C. AVX2 has 16 registers: 4 rows of 3 vectors of C, 3 vectors of B
// and one element of A.
constexpr int TILE_VECTORS = LANES == 8 ? 3 : 4;

// C (m, n) = A (m, k) B (k, n), or C += A B if `accumulate`, for matrices that fit in the cache. m
// and n are multiples of LANES. A[i, j] is a[i * a_row + j * a_column], so A may be transposed. The
// speed equals that of oneDNN without its call overhead of 0.2 us.
template <int vectors = TILE_VECTORS>
void small_product(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_column,
    const float* b, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  if (k == 0) {
    for (int64_t i = 0; i < m && !accumulate; i++) std::fill_n(c + i * ldc, n, 0.0f);
    return;
  }
  constexpr int64_t width = vectors * LANES, rows = 2 * vectors > TILE_VECTORS ? 4 : 8;
  for (; n >= width; n -= width, b += width, c += width)
    for (int64_t i = 0; i < m; i += rows)
      product_tile<rows, vectors>(
          k, a + i * a_row, a_row, a_column, b, ldb, c + i * ldc, ldc, accumulate);
  if constexpr (vectors > 1)
    if (n) small_product<vectors - 1>(m, n, k, a, a_row, a_column, b, ldb, c, ldc, accumulate);
}

// Interleaves a[from:] and b[from:]: a[from], b[from], a[from + 1], b[from + 1], ...
template <int64_t from, size_t... i>
inline Vec interleaved(Vec a, Vec b, std::index_sequence<i...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, (from + i / 2 + i % 2 * LANES)...);
#else
  return __builtin_shuffle(a, b, IntVec{(from + i / 2 + i % 2 * LANES)...});
#endif
}

// first, first + 1, ...
inline IntVec lane_indices(int64_t first) {
  IntVec indices;
  for (int32_t i = 0; i < LANES; i++) indices[i] = i;
  return indices + static_cast<int32_t>(first);
}

// Reduces the lanes with a binary operation, as a tree.
template <class Op>
inline float reduce_lanes(Vec v, Op op) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  for (int64_t n = 1; n < LANES; n *= 2)
    v = op(interleaved<0>(v, v, lanes), interleaved<LANES / 2>(v, v, lanes));
  return v[0];
}
inline float max_lane(Vec v) { return reduce_lanes(v, vec_max); }
inline float sum_lanes(Vec v) { return reduce_lanes(v, [](Vec a, Vec b) { return a + b; }); }

// Lane i of the result is the sum of the lanes of vectors[i]. Overwrites the LANES input vectors.
inline Vec lane_sums(Vec* vectors) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  // Unrolling keeps the vectors in registers.
#pragma GCC unroll 4
  for (int64_t n = LANES / 2; n > 0; n /= 2)
#pragma GCC unroll 8
    for (int64_t i = 0; i < n; i++)
      vectors[i] = interleaved<0>(vectors[i], vectors[i + n], lanes) +
                   interleaved<LANES / 2>(vectors[i], vectors[i + n], lanes);
  return vectors[0];
}

// out (LANES, LANES) = factor * in^T. `stride` and `ld` are the row strides of `in` and `out`.
inline void transpose_tile(
    const float* in, int64_t stride, float* out, int64_t ld, float factor) {
  constexpr auto lanes = std::make_index_sequence<LANES>();
  Vec tile[LANES], next[LANES];
  for (int64_t i = 0; i < LANES; i++) tile[i] = factor * load(in + i * stride);
  // Number the elements row * LANES + column. Each step rotates the bits of this number by one.
  // After log2(LANES) steps, the row bits and the column bits are swapped.
  for (int64_t n = 1; n < LANES; n *= 2) {
    for (int64_t i = 0; i < LANES / 2; i++) {
      next[2 * i] = interleaved<0>(tile[i], tile[i + LANES / 2], lanes);
      next[2 * i + 1] = interleaved<LANES / 2>(tile[i], tile[i + LANES / 2], lanes);
    }
    std::copy_n(next, LANES, tile);
  }
  for (int64_t j = 0; j < LANES; j++) store(out + j * ld, tile[j]);
}

// out (columns, rows) = factor * in^T, for `in` (rows, columns).
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

// out (rows, columns) = factor * in.
void copy(
    const float* in, int64_t stride, int64_t rows, int64_t columns, float* out, int64_t ld,
    float factor = 1) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) out[r * ld + c] = factor * in[r * stride + c];
}

// Asks the operating system for huge pages: one page fault then maps 2 MiB instead of 4 KiB. Only
// useful for memory that has not been written yet.
inline void use_huge_pages(float* memory, int64_t size) {
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t end = reinterpret_cast<uintptr_t>(memory + size) / PAGE * PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Uninitialised scratch memory, aligned to a cache line.
struct Buffer {
  std::unique_ptr<float, void (*)(void*)> memory;
  explicit Buffer(int64_t size)
      : memory(static_cast<float*>(std::aligned_alloc(64, padded(std::max<int64_t>(size, 1)) * 4)),
               std::free) {
    if (!memory) throw std::bad_alloc();
  }
  operator float*() const { return memory.get(); }
};

// Runs a kernel. Returns 1, or 0 if it runs out of memory.
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
