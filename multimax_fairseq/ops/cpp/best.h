// The top-k scores of each row and the row's log-sum-exp, for beam search.
#pragma once

#include "output.h"
#include "vectors.h"

struct Best {
  int64_t rows, classes, count, threads;
  const float* scores;  // (rows, classes)
  float* values;        // (rows, count), in descending order
  int64_t* indices;     // (rows, count); among equal scores, smaller indices come first
  float* totals;        // (rows,): log-sum-exp
};

namespace {

// Inserts a score into a list in descending order and drops the last entry.
inline void insert(float score, int64_t index, int64_t count, float* values, int64_t* indices) {
  int64_t place = count - 1;
  for (; place > 0 && score > values[place - 1]; place--)
    values[place] = values[place - 1], indices[place] = indices[place - 1];
  values[place] = score, indices[place] = index;
}

// Bit i is set if scores[i] > bounds[i].
inline uint32_t above(Vec scores, Vec bounds) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(scores, bounds, _CMP_GT_OQ);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(scores, bounds, _CMP_GT_OQ));
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
  // Few of the remaining blocks contain a top score, so check the maximum of a block first.
  int64_t v = a.count;
  for (; v + BLOCK <= a.classes; v += BLOCK) {
    Vec maximum = load(scores + v);
    for (int64_t i = v + LANES; i < v + BLOCK; i += LANES)
      maximum = vec_max(maximum, load(scores + i));
    if (!above(maximum, broadcast(values[a.count - 1]))) continue;
    for (int64_t i = v; i < v + BLOCK; i += LANES) {
      uint32_t better = above(load(scores + i), broadcast(values[a.count - 1]));
      for (; better; better &= better - 1) consider(i + __builtin_ctz(better));
    }
  }
  for (; v < a.classes; v++) consider(v);

  const float top = values[0];
  if (std::abs(top) == INFINITE) {
    // Either all scores are -inf or one is +inf: the log-sum-exp is the maximum, but NaN wins.
    a.totals[row] = top;
    for (int64_t v = 0; v < a.classes; v++)
      if (std::isnan(scores[v])) a.totals[row] = scores[v];
    return;
  }
  Vec sum{};
  for (v = 0; v + LANES <= a.classes; v += LANES) sum += exponential(load(scores + v) - top);
  Vec rest = broadcast(-INFINITE);
  std::memcpy(&rest, scores + v, (a.classes - v) * sizeof(float));
  sum += exponential(rest - top);
  a.totals[row] = top + std::log(sum_lanes_double(sum));
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

// The top-k modulated scores of a linear layer and their log-sum-exp, without storing all scores.
// The scores of the classes in `apart_classes` are returned separately and excluded from the top k,
// but not from the log-sum-exp.
struct BestOutputs {
  int64_t tokens, classes, size, count, apart, threads, columns;
  const float *features, *weight, *bias;  // (tokens, size), (classes, size), (classes,) or null
  const float* parameters;                     // (columns,), or null if columns is 0
  const int64_t* apart_classes;           // (apart,)
  float* values;                          // (tokens, count), in descending order
  // (tokens, count). Among equal scores, smaller indices come first; the indices of scores of -inf
  // are arbitrary.
  int64_t* indices;
  float* totals;        // (tokens,): log-sum-exp; NaN if a score is NaN or +inf
  float* apart_scores;  // (tokens, apart)
};

namespace {

// Tokens in a block: a tile of their scores and their top-k lists fit in the L2 cache.
constexpr int64_t MAX_TOKENS = 256;

// Running top-k lists and log-sum-exp of a block of tokens, over the classes seen by one thread.
struct Candidates {
  const int64_t width, count;
  Buffer values;                 // (count, width), descending
  std::vector<int32_t> indices;  // (count, width)
  Buffer tops, sums;             // (width,): maximum score, sum of exp(score - top)
  Candidates(int64_t width, int64_t count)
      : width(width), count(count), values(count * width), indices(count * width), tops(width),
        sums(width) {
    std::fill_n(values + 0, count * width, -INFINITE);
    std::fill_n(tops + 0, width, -INFINITE);
    std::fill_n(sums + 0, width, 0.0f);
  }
  // The smallest scores in the lists of tokens [q, q + LANES).
  Vec bounds(int64_t q) const { return load(values + (count - 1) * width + q); }

  // Inserts one score for each of the tokens [q, q + LANES) and drops the last entries.
  void insert(int64_t q, Vec score, IntVec index) {
    for (int64_t j = q; j < count * width; j += width) {
      const Vec value = load(values + j);
      const IntVec at = load(&indices[j]);
      const IntVec is_better = score > value;
      const IntVec kept = is_better ? index : at;
      store(values + j, is_better ? score : value);
      std::memcpy(&indices[j], &kept, sizeof kept);
      score = is_better ? value : score, index = is_better ? at : index;
    }
  }

  void add_sum(int64_t q, Vec top, Vec sum) {
    const Vec before = load(tops + q), maximum = vec_max(before, top);
    const Vec base = exp_shift(maximum);
    store(tops + q, maximum);
    store(sums + q, load(sums + q) * exponential(before - base) + sum * exponential(top - base));
  }

  void merge(const Candidates& other) {
    for (int64_t q = 0; q < width; q += LANES) {
      for (int64_t j = q; j < count * width; j += width)
        insert(q, load(other.values + j), load(&other.indices[j]));
      add_sum(q, load(other.tops + q), load(other.sums + q));
    }
  }
};

// Adds the scores of the tokens [n0, n0 + count) and the classes [v0, v0 + rows) to `candidates`.
// `scores` is scratch memory for this tile.
template <class Sigma>
void scan_tile(const BestOutputs& a, int64_t n0, int64_t count, const float* features_t, int64_t v0,
               int64_t rows, float* scores, Candidates& candidates) {
  const Sigma sigma(a.parameters);
  packed_product(rows, candidates.width, a.size, a.weight + v0 * a.size, a.size, features_t, scores,
                 candidates.width, false);
  Vec modulated[CLASSES];
  for (int64_t q = 0; q < candidates.width; q += LANES) {
    Vec top = broadcast(-INFINITE);
    for (int64_t v = 0; v < rows; v++) {
      const Vec x = load(scores + v * candidates.width + q) + (a.bias ? a.bias[v0 + v] : 0);
      top = vec_max(top, modulated[v] = sigma.value(x));
    }
    Vec sum{};
    const Vec base = exp_shift(top);
    for (int64_t v = 0; v < rows; v++) sum += exponential(modulated[v] - base);
    candidates.add_sum(q, top, sum);
    const auto for_each_apart = [&](auto work) {
      for (int64_t i = 0; i < a.apart; i++) {
        const int64_t v = a.apart_classes[i] - v0;
        if (v >= 0 && v < rows) work(i, modulated[v]);
      }
    };
    for_each_apart([&](int64_t i, const Vec& score) {
      for (int64_t n = q; n < std::min(q + LANES, count); n++)
        a.apart_scores[(n0 + n) * a.apart + i] = score[n - q];
    });
    for_each_apart([](int64_t, Vec& score) { score = broadcast(-INFINITE); });
    for (int64_t v = 0; v < rows; v++)
      if (above(modulated[v], candidates.bounds(q)))
        candidates.insert(q, modulated[v], IntVec{} + static_cast<int32_t>(v0 + v));
  }
}

// Writes the results of the tokens [n0, n0 + count).
template <class Sigma>
void best_outputs_block(const BestOutputs& a, int64_t n0, int64_t count) {
  const int64_t width = padded(count), threads = std::min(a.threads, tiles_of(a.classes));
  const Buffer features_t(width * a.size), scores(threads * CLASSES * width);
  std::fill_n(features_t + 0, width * a.size, 0.0f);
  for (int64_t q = 0; q < count; q += panel_width())
    transpose(a.features + (n0 + q) * a.size, a.size, std::min(panel_width(), count - q), a.size,
              features_t + q * a.size, std::min(panel_width(), width - q));
  std::vector<Candidates> candidates;
  for (int64_t i = 0; i < threads; i++) candidates.emplace_back(width, a.count);
  for_each_tile(a.classes, threads, [&](int64_t i, int64_t v0, int64_t rows) {
    scan_tile<Sigma>(a, n0, count, features_t, v0, rows, scores + i * CLASSES * width,
                     candidates[i]);
  });
  for (int64_t i = 1; i < threads; i++) candidates[0].merge(candidates[i]);
  for (int64_t q = 0; q < count; q++) {
    a.totals[n0 + q] = candidates[0].tops[q] + std::log(candidates[0].sums[q]);
    for (int64_t j = 0; j < a.count; j++) {
      a.values[(n0 + q) * a.count + j] = candidates[0].values[j * width + q];
      a.indices[(n0 + q) * a.count + j] = candidates[0].indices[j * width + q];
    }
  }
}

}  // namespace

extern "C" int best_outputs(const BestOutputs* best) {
  const BestOutputs& a = *best;
  return guarded([&] {
    dispatch_modulator(a.columns, [&](auto* kind) {
      for (int64_t n = 0; n < a.tokens; n += MAX_TOKENS)
        best_outputs_block<std::remove_pointer_t<decltype(kind)>>(
            a, n, std::min(MAX_TOKENS, a.tokens - n));
    });
  });
}
