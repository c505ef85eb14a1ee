// The best scores of each row, and its log-sum-exp: what a step of beam search chooses from.
#pragma once

#include "vectors.h"

struct Best {
  int64_t rows, classes, count, threads;
  const float* scores;  // (rows, classes)
  float* values;        // (rows, count), the largest first
  int64_t* indices;     // (rows, count); of equal scores the earlier classes
  float* totals;        // (rows)
};

namespace {

// Puts a score into a falling list, whose last one goes.
inline void insert(float score, int64_t index, int64_t count, float* values, int64_t* indices) {
  int64_t place = count - 1;
  for (; place > 0 && score > values[place - 1]; place--)
    values[place] = values[place - 1], indices[place] = indices[place - 1];
  values[place] = score, indices[place] = index;
}

// A bit for each score above the bound.
inline uint32_t above(Vec scores, float bound) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(scores, all(bound), _CMP_GT_OQ);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(scores, all(bound), _CMP_GT_OQ));
#endif
}

void best_of_row(const Best& a, int64_t row) {
  constexpr int64_t BLOCK = 8 * LANES;
  const float* scores = a.scores + row * a.classes;
  float* values = a.values + row * a.count;
  int64_t* indices = a.indices + row * a.count;
  for (int64_t v = 0; v < a.count; v++) insert(scores[v], v, v + 1, values, indices);
  const auto consider = [&](int64_t i) {
    if (scores[i] > values[a.count - 1]) insert(scores[i], i, a.count, values, indices);
  };
  // From here on most blocks have nothing for the list.
  int64_t v = a.count;
  for (; v + BLOCK <= a.classes; v += BLOCK) {
    Vec most = load(scores + v);
    for (int64_t i = v + LANES; i < v + BLOCK; i += LANES) most = larger(most, load(scores + i));
    if (!above(most, values[a.count - 1])) continue;
    for (int64_t i = v; i < v + BLOCK; i += LANES) {
      uint32_t found = above(load(scores + i), values[a.count - 1]);
      for (; found; found &= found - 1) consider(i + __builtin_ctz(found));
    }
  }
  for (; v < a.classes; v++) consider(v);

  const float top = values[0];
  if (std::abs(top) == INFINITE) {
    // Of -inf alone the total is -inf; beside +inf it is that, unless there is a NaN as well.
    a.totals[row] = top;
    for (int64_t v = 0; v < a.classes; v++)
      if (std::isnan(scores[v])) a.totals[row] = scores[v];
    return;
  }
  Vec sum{};
  for (v = 0; v + LANES <= a.classes; v += LANES) sum += exponential(load(scores + v) - top);
  Vec rest = all(-INFINITE);
  std::memcpy(&rest, scores + v, (a.classes - v) * sizeof(float));
  sum += exponential(rest - top);
  a.totals[row] = top + std::log(total(sum));
}

}  // namespace

extern "C" int best_scores(const Best* best) {
  const Best& a = *best;
  const int64_t threads = std::max<int64_t>(1, std::min(a.threads, a.rows));
  return guarded([&] {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < a.rows; row++) best_of_row(a, row);
  });
}
