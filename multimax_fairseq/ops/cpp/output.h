// The output layer: the fused loss with its gradients, and the modulated scores for decoding.
#pragma once

#include "modulator.h"
#include "vectors.h"

struct OutputLoss {
  int64_t tokens, classes, size, chunk, threads, columns, ignore_index;
  int64_t entropy;  // whether loss is the entropy of p
  // The gradient of the modulated logit z[k] of a token is
  // factors[token] * ((1 + 2 z_weight lse) p[k] - smooth_weight - nll_weight * [k == target]
  // + max_weight * ([z[k] is the maximum] / (number of maxima) - 1 / classes)),
  // where lse is the log-sum-exp of z. With entropy there are two factors for each token, those of
  // nll and of the entropy, and the gradient is
  // factors[token][0] * (p[k] - [k == target])
  // - factors[token][1] * p[k] * (z[k] - sum_j p[j] z[j]).
  float smooth_weight, nll_weight, z_weight, max_weight;
  const float *features, *weight, *bias;  // (tokens, size), (classes, size), (classes,) or null
  const float* parameters;                     // (columns,), or null if columns is 0
  const int64_t* target;                  // (tokens,)
  const float* factors;                   // (tokens,) or (tokens, 2); null: no gradients
  // (tokens,): nll = lse - z[target], and, without entropy,
  // loss = nll_weight * nll + smooth_weight * sum_k (lse - z[k]) + z_weight * lse^2
  // + max_weight * (max z - mean z).
  double *nll, *loss;
  float *grad_features, *grad_weight, *grad_bias;  // each may be null
  double* grad_parameters;                              // (COLUMNS,)
};

namespace {

constexpr int64_t CLASSES = 128, TOKENS = 64;  // the size of a tile
constexpr int64_t FLOAT_ROWS = 16;  // rows of a tile that are summed in float before double

inline int64_t tiles_of(int64_t classes) { return (classes + CLASSES - 1) / CLASSES; }

// Calls work(thread, v0, rows) for each tile of classes [v0, v0 + rows). The scheduling is static,
// so the sums of each thread are reproducible.
template <class Work>
void for_each_tile(int64_t classes, int64_t threads, Work work) {
  const int64_t tiles = tiles_of(classes);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++) {
    for (int64_t t = tiles * i / threads; t < tiles * (i + 1) / threads; t++)
      work(i, t * CLASSES, std::min(CLASSES, classes - t * CLASSES));
    release_products();
  }
}

// A chunk of tokens: its features, logits, statistics and scratch memory.
struct Chunk {
  int64_t count, width;            // tokens, and tokens padded to a multiple of LANES
  const int64_t* rows;             // (count,): the indices of the tokens
  Buffer features, features_t;     // (width, size), (size, width), both packed
  // Logits before the modulator: (classes, width) if gradients are needed, otherwise one tile of
  // (CLASSES, width) for each thread.
  float* logits;
  int64_t stride;                  // between the logits of two classes
  // (width,): maximum of the modulated logits, (1 + 2 z_weight lse) / sum of exp, factor of the
  // gradient, max_weight / (number of maxima), sum_j p[j] z[j], factor of the entropy's gradient.
  Buffer tops, inverses, factors, max_shares, means, entropy_factors;
  Buffer scratch;                  // (2 * CLASSES, width) for each thread
  Buffer grad_features;            // (width, size) for each thread: the sum over its classes
};

// Statistics of a token's modulated logits z: maximum and how many z equal it, sum of
// exp(z - top), sum of z exp(z - top), sum of z, z[target].
struct Column {
  float top = -INFINITE, maxima = 0;
  double sum = 0, weighted = 0, sum_z = 0, target_z = 0;
  void merge(float other_top, float other_maxima, double other_sum, double other_weighted) {
    if (other_top >= top) maxima = other_maxima + (other_top == top ? maxima : 0);
    if (other_top > top)
      std::swap(top, other_top), std::swap(sum, other_sum), std::swap(weighted, other_weighted);
    // The check avoids -inf - (-inf) = NaN for an empty column. A NaN among the logits passes it.
    if (other_sum == 0) return;
    const double factor = std::exp(double(other_top) - top);
    sum += other_sum * factor, weighted += other_weighted * factor;
  }
};

// A lower bound for log p, at which p is 0: the product p log p of an excluded class is 0, not NaN.
constexpr float LEAST_LOG = -1000;

template <class Sigma>
void tile_statistics(
    const OutputLoss& a, Chunk& c, int64_t v0, int64_t rows, float* logits, Column* columns) {
  const Sigma sigma(a.parameters);
  packed_product(rows, c.width, a.size, a.weight + v0 * a.size, a.size, c.features_t, logits,
                 c.stride, false);
  Vec modulated[CLASSES];
  for (int64_t q = 0; q < c.width; q += LANES) {
    Vec maximum = broadcast(-INFINITE), sum_z{};
    for (int64_t v = 0; v < rows; v++) {
      float* at = logits + v * c.stride + q;
      if (a.bias) store(at, load(at) + a.bias[v0 + v]);
      const Vec z = modulated[v] = sigma.value(load(at));
      maximum = vec_max(maximum, z);
      sum_z += z;
    }
    Vec sum{}, maxima{}, weighted{};
    const Vec base = exp_shift(maximum);
    if (a.entropy)
      for (int64_t v = 0; v < rows; v++) {
        const Vec shifted = modulated[v] - base, e = exponential(shifted);
        sum += e;
        weighted += e * vec_max(shifted, broadcast(LEAST_LOG));
      }
    else
      for (int64_t v = 0; v < rows; v++) sum += exponential(modulated[v] - base);
    if (a.max_weight)
      for (int64_t v = 0; v < rows; v++)
        maxima += modulated[v] == maximum ? broadcast(1) : Vec{};
    for (int64_t i = 0; i < LANES; i++) {
      columns[q + i].merge(maximum[i], maxima[i], sum[i],
                           weighted[i] + double(base[i]) * sum[i]);
      columns[q + i].sum_z += sum_z[i];
    }
  }
  for (int64_t q = 0; q < c.count; q++) {
    const int64_t v = a.target[c.rows[q]] - v0;
    if (v >= 0 && v < rows)
      columns[q].target_z = sigma.value(broadcast(logits[v * c.stride + q]))[0];
  }
}

// Computes the gradients of a tile of logits and adds the tile's part of all other gradients.
template <class Sigma>
void tile_gradients(
    const OutputLoss& a, Chunk& c, int64_t v0, int64_t rows, bool first, float* scratch,
    float* grad_features, double* grad_parameters) {
  const Sigma sigma(a.parameters);
  const float* logits = c.logits + v0 * c.stride;
  // Separate from the logits, because grad_weight may overwrite those.
  float* grads = scratch;                           // (rows, width)
  float* transposed = scratch + CLASSES * c.width;  // (width, CLASSES)
  Sums sums;
  const float constant = a.smooth_weight + a.max_weight / a.classes;
  for (int64_t v = 0; v < rows; v++) {
    for (int64_t q = 0; q < c.width; q += LANES) {
      const float* at = logits + v * c.stride + q;
      // Prefetch the logits of the next tile.
      __builtin_prefetch(at + CLASSES * c.stride, 0, 2);
      const Vec x = load(at), z = sigma.value(x);
      const Vec p = exponential(z - load(c.tops + q)) * load(c.inverses + q);
      Vec part = p - constant;
      if (a.max_weight) part += z == load(c.tops + q) ? load(c.max_shares + q) : Vec{};
      part *= load(c.factors + q);
      if (a.entropy)
        part -= load(c.entropy_factors + q) * p *
                vec_max(z - load(c.means + q), broadcast(LEAST_LOG));
      store(grads + v * c.width + q, sigma.backward(x, part, sums));
    }
    if (v % FLOAT_ROWS == FLOAT_ROWS - 1)
      sigma.add_gradients(std::exchange(sums, {}), grad_parameters);
  }
  for (int64_t q = 0; q < c.count; q++) {
    const int64_t v = a.target[c.rows[q]] - v0;
    if (v < 0 || v >= rows) continue;
    Vec grad{};
    grad[0] = -a.nll_weight * c.factors[q];
    grads[v * c.width + q] += sigma.backward(broadcast(logits[v * c.stride + q]), grad, sums)[0];
  }
  sigma.add_gradients(sums, grad_parameters);
  if (a.grad_bias)
    for (int64_t v = 0; v < rows; v++) {
      Vec sum{};
      for (int64_t q = 0; q < c.width; q += LANES) sum += load(grads + v * c.width + q);
      a.grad_bias[v0 + v] = (first ? 0 : a.grad_bias[v0 + v]) + sum_lanes_double(sum);
    }
  if (a.grad_weight)
    packed_product(rows, a.size, c.width, grads, c.width, c.features,
                   a.grad_weight + v0 * a.size, a.size, !first);
  if (grad_features) {
    transpose(grads, c.width, rows, c.width, transposed, CLASSES);
    product(c.width, a.size, rows, transposed, CLASSES, a.weight + v0 * a.size, a.size,
            grad_features, a.size, true);
  }
}

template <class Sigma>
void output_loss_chunk(const OutputLoss& a, Chunk& c, bool first) {
  const int64_t threads = std::min(a.threads, tiles_of(a.classes));
  for (int64_t d = 0; d < a.size; d += panel_width()) {
    const int64_t columns = std::min(panel_width(), a.size - d);
    float* features = c.features + d * c.width;
    for (int64_t q = 0; q < c.count; q++)
      std::copy_n(a.features + c.rows[q] * a.size + d, columns, features + q * columns);
    std::fill(features + c.count * columns, features + c.width * columns, 0.0f);
    for (int64_t q = 0; q < c.width; q += panel_width()) {
      const int64_t tokens = std::min(panel_width(), c.width - q);
      transpose(features + q * columns, columns, tokens, columns,
                c.features_t + q * a.size + d * tokens, tokens);
    }
  }

  std::vector<Column> columns(threads * c.width);
  for_each_tile(a.classes, threads, [&](int64_t i, int64_t v0, int64_t rows) {
    tile_statistics<Sigma>(a, c, v0, rows,
                           c.logits + (a.factors ? v0 : i * CLASSES) * c.stride,
                           &columns[i * c.width]);
  });
  for (int64_t q = 0; q < c.width; q++) {
    Column merged = columns[q];
    for (int64_t i = 1; i < threads; i++) {
      const Column& part = columns[i * c.width + q];
      merged.merge(part.top, part.maxima, part.sum, part.weighted);
      merged.sum_z += part.sum_z, merged.target_z += part.target_z;
    }
    const double log_total = merged.top + std::log(merged.sum);
    c.tops[q] = merged.top, c.factors[q] = c.entropy_factors[q] = 0;
    c.means[q] = merged.weighted / merged.sum;
    c.max_shares[q] = a.max_weight / std::max(merged.maxima, 1.0f);
    c.inverses[q] = (a.z_weight ? 1 + 2 * a.z_weight * log_total : 1) / merged.sum;
    if (q >= c.count) continue;
    const double nll = log_total - merged.target_z, smooth = a.classes * log_total - merged.sum_z;
    a.nll[c.rows[q]] = nll;
    // Without the checks, 0 * inf would be NaN.
    a.loss[c.rows[q]] = a.nll_weight * nll + (a.smooth_weight ? a.smooth_weight * smooth : 0) +
                        (a.z_weight ? a.z_weight * log_total * log_total : 0) +
                        (a.max_weight ? a.max_weight * (merged.top - merged.sum_z / a.classes) : 0);
    if (a.entropy) a.loss[c.rows[q]] = log_total - merged.weighted / merged.sum;
    if (!a.factors) continue;
    c.factors[q] = a.factors[c.rows[q] * (a.entropy ? 2 : 1)];
    if (a.entropy) c.entropy_factors[q] = a.factors[2 * c.rows[q] + 1];
  }
  if (!a.factors) return;

  const int64_t features = a.grad_features ? c.width * a.size : 0;
  std::fill_n(c.grad_features + 0, threads * features, 0.0f);
  std::vector<double> parameter_sums(threads * COLUMNS);
  const int64_t scratch_size = 2 * CLASSES * c.width;
  for_each_tile(a.classes, threads, [&](int64_t i, int64_t v0, int64_t rows) {
    tile_gradients<Sigma>(a, c, v0, rows, first, c.scratch + i * scratch_size,
                          features ? c.grad_features + i * features : nullptr,
                          &parameter_sums[i * COLUMNS]);
  });
  for (int64_t i = 0; i < threads; i++) {
    for (int j = 0; j < COLUMNS; j++) a.grad_parameters[j] += parameter_sums[i * COLUMNS + j];
    for (int64_t q = 0; features && q < c.count; q++) {
      float* out = a.grad_features + c.rows[q] * a.size;
      const float* part = c.grad_features + i * features + q * a.size;
      for (int64_t d = 0; d < a.size; d++) out[d] = (i ? out[d] : 0) + part[d];
    }
  }
}

// `rows`: the indices of the tokens that are not ignored.
template <class Sigma>
void output_loss_rows(const OutputLoss& a, const std::vector<int64_t>& rows) {
  const int64_t tokens = rows.size();
  if (!tokens) {
    if (a.grad_weight) std::fill_n(a.grad_weight, a.classes * a.size, 0.0f);
    if (a.grad_bias) std::fill_n(a.grad_bias, a.classes, 0.0f);
    return;
  }
  const int64_t width = padded(std::min(a.chunk, tokens));
  if (a.grad_weight) use_huge_pages(a.grad_weight, a.classes * a.size);
  // The logits of a single chunk can use the memory of grad_weight: each tile's gradient overwrites
  // logits that are no longer needed.
  const bool in_grad_weight = a.factors && a.grad_weight && tokens <= a.chunk && width <= a.size;
  const Buffer logits(in_grad_weight ? 0 : width * (a.factors ? a.classes : a.threads * CLASSES));
  Chunk c{0, 0, nullptr, Buffer(width * a.size), Buffer(width * a.size),
          in_grad_weight ? a.grad_weight : logits + 0, 0,
          Buffer(width), Buffer(width), Buffer(width), Buffer(width), Buffer(width), Buffer(width),
          Buffer(a.factors ? a.threads * 2 * CLASSES * width : 0),
          Buffer(a.factors && a.grad_features ? a.threads * width * a.size : 0)};
  for (int64_t n = 0; n < tokens; n += a.chunk) {
    c.count = std::min(a.chunk, tokens - n), c.width = padded(c.count), c.rows = &rows[n];
    c.stride = in_grad_weight ? a.size : c.width;
    output_loss_chunk<Sigma>(a, c, n == 0);
  }
}

}  // namespace

// Returns 1; 0 if it runs out of memory; -1 - n if target[n] is the first invalid class.
extern "C" int output_loss(const OutputLoss* loss) {
  const OutputLoss& a = *loss;
  for (int64_t n = 0; n < a.tokens; n++)
    if (a.target[n] != a.ignore_index && (a.target[n] < 0 || a.target[n] >= a.classes))
      return static_cast<int>(-1 - n);
  return guarded([&] {
    std::vector<int64_t> rows;
    for (int64_t n = 0; n < a.tokens; n++) {
      if (a.target[n] != a.ignore_index) {
        rows.push_back(n);
        continue;
      }
      a.nll[n] = a.loss[n] = 0;
      if (a.grad_features) std::fill_n(a.grad_features + n * a.size, a.size, 0.0f);
    }
    dispatch_modulator(a.columns, [&](auto* kind) {
      output_loss_rows<std::remove_pointer_t<decltype(kind)>>(a, rows);
    });
  });
}

struct Projection {
  int64_t tokens, classes, size, threads, columns;
  const float *features, *weight, *bias;  // (tokens, size), (classes, size), (classes,) or null
  const float* parameters;                     // (columns,), or null if columns is 0
  float* out;                             // (tokens, classes), modulated
};

namespace {

template <class Sigma>
void project(const Projection& a) {
  const Sigma sigma(a.parameters);
  const int64_t threads = std::min(a.threads, tiles_of(a.classes));
  const Buffer weights(threads * a.size * CLASSES);
  for_each_tile(a.classes, threads, [&](int64_t i, int64_t v0, int64_t count) {
    float* weight = weights + i * a.size * CLASSES;
    transpose(a.weight + v0 * a.size, a.size, count, a.size, weight, CLASSES);
    for (int64_t n = 0; n < a.tokens; n += TOKENS) {
      const int64_t rows = std::min(TOKENS, a.tokens - n);
      float* out = a.out + n * a.classes + v0;
      product(rows, count, a.size, a.features + n * a.size, a.size, weight, CLASSES, out,
              a.classes, false);
      if (!a.bias && !a.parameters) continue;
      for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < count; v += LANES) {
          float* at = out + r * a.classes + v;
          const Vec bias = a.bias ? load(a.bias + v0 + v, count - v) : Vec{};
          store(at, sigma.value(load(at, count - v) + bias), count - v);
        }
    }
  });
}

}  // namespace

extern "C" int projection(const Projection* projection) {
  return guarded([&] {
    dispatch_modulator(projection->columns, [&](auto* kind) {
      project<std::remove_pointer_t<decltype(kind)>>(*projection);
    });
  });
}
