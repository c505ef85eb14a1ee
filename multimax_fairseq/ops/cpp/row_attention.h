// Attention by row functions, dropout(f(scale Q K^T + mask)) V, and its gradients. The including file
// defines `dispatch_row`, which calls a function for the row function with a number.
//
// A thread computes all scores of a block of queries before it applies the row function. Matrix
// products skip groups of zero weights, so NaN in the value of a key with weight 0 may not
// propagate.
#pragma once

#include "attention.h"
#include "rows.h"

namespace {

constexpr int64_t GROUPS = QUERIES / LANES;

// Which groups of LANES keys by LANES queries have a weight that is not 0.
class Support {
  uint8_t* const nonzero;  // (keys / LANES, GROUPS)

 public:
  explicit Support(float* scratch) : nonzero(reinterpret_cast<uint8_t*>(scratch)) {}
  static int64_t floats(int64_t keys) { return padded((keys / LANES * GROUPS + 3) / 4); }
  float* end(int64_t keys) const { return reinterpret_cast<float*>(nonzero) + floats(keys); }
  uint8_t& at(int64_t s, int64_t q) const { return nonzero[s / LANES * GROUPS + q / LANES]; }
  // Calls product(s, q, count) for each group of LANES keys; only the queries [q, q + count) have
  // weights.
  template <class Product>
  void for_each_key_group(int64_t first, int64_t last, int64_t width, Product product) const {
    for (int64_t s = first; s < last; s += LANES) {
      int64_t q = 0, end = width;
      while (q < end && !at(s, q)) q += LANES;
      while (q < end && !at(s, end - LANES)) end -= LANES;
      if (q < end) product(s, q, end - q);
    }
  }
  // Calls product(s, count) for each range of keys for which the queries [q, q + LANES) have
  // weights.
  template <class Product>
  void for_each_range(int64_t q, int64_t first, int64_t last, Product product) const {
    for (int64_t s = first, end; s < last; s = end) {
      for (end = s; end < last && at(end, q); end += LANES) {}
      if (end > s) product(s, end - s);
      else end += LANES;
    }
  }
};

// Computes the scores of a block of queries, (keys, QUERIES); those of excluded keys are -inf.
template <bool MASKED>
void row_scores(
    const Attention& a, int64_t b, int64_t h, int64_t q0, int64_t count, const Window& w,
    const float* key, const float* query_t, float* scores, float* mask) {
  const int64_t width = padded(count), pitch = padded(a.size);
  const int64_t first = w.first / LANES * LANES, last = padded(w.last);
  for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
    s1 = std::min(s0 + KEYS_L1, last);
    w.for_each_key_group(s0, s1, [&](int64_t s, int64_t q) {
      small_product(LANES, width - q, a.size, key + s * pitch, pitch, 1, query_t + q, QUERIES,
                    scores + s * QUERIES + q, QUERIES, false);
    });
    if (MASKED) mask_tile(a.mask, a.keys, b, h, q0, count, s0, s1, mask);
    for (int64_t q = 0; q < width; q += LANES)
      for (int64_t s = s0; s < w.stop(q, s0, s1); s++) {
        float* at = scores + s * QUERIES + q;
        if (MASKED) store(at, masked(load(at), load(mask + (s - s0) * QUERIES + q)));
        if (s < w.common_first || s >= w.common_last)
          store(at, may_attend(w, q, s) ? load(at) : broadcast(-INFINITE));
      }
  }
}

template <class Row>
Row row_of(const Attention& a, int64_t h) {
  return Row(a.row_parameter ? a.row_parameter[h] : 0);
}

template <class Row, bool MASKED>
void row_forward_head(const Attention& a, int64_t b, int64_t h, int64_t, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size, pitch = padded(size);
  const Row row = row_of<Row>(a, h);
  const Dropout dropout(a.dropout, a.seed, bh);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, pitch)
  float* rows = scratch + keys * pitch;
  const float* value = dense_rows(a.value, b, h, a.keys, size, rows);  // (keys, pitch)
  float* query_t = rows + keys * pitch;       // (size, QUERIES), scaled
  float* output = query_t + size * QUERIES;   // (QUERIES, pitch)
  float* mask = output + QUERIES * pitch;     // (KEYS_L1, QUERIES)
  float* scores = mask + KEYS_L1 * QUERIES;   // (keys, QUERIES); later the weights
  Support support(scores + keys * QUERIES);

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a.starts, a.ends, a.queries, a.keys, a.is_causal, b, q0, count);
    const int64_t first = w.first / LANES * LANES, last = padded(w.last);
    if (count < width) std::fill(query_t, output, 0.0f);
    transpose(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query_t, QUERIES,
              a.scale);
    row_scores<MASKED>(a, b, h, q0, count, w, key, query_t, scores, mask);
    std::fill_n(output, QUERIES * pitch, 0.0f);
    for (int64_t q = 0; q < width; q += LANES) {
      const int64_t stop = w.stop(q, first, last);
      const Scores own{scores + q, QUERIES, first, stop};
      const Statistics statistics = row.reduce(own);
      if (a.statistics) {
        float* out = a.statistics + 3 * bh * a.queries + q0 + q;
        for (const Vec& x : {statistics.top, statistics.threshold, statistics.factor}) {
          store(out, x, count - q);
          out += a.queries;
        }
      }
      for (int64_t s0 = first; s0 < last; s0 += LANES) {
        IntVec nonzero{};
        for (int64_t s = s0; s < s0 + LANES; s++) {
          float* at = scores + s * QUERIES + q;
          const Vec p = s < stop ? row.entry(load(at), statistics).weight : Vec{};
          nonzero |= p != 0;
          store(at, a.dropout > 0 ? p * dropout.keep(dropout.key(s), q0 + q) : p);
        }
        support.at(s0, q) = any(nonzero);
      }
      support.for_each_range(q, first, last, [&](int64_t s, int64_t depth) {
        small_product(LANES, pitch, depth, scores + s * QUERIES + q, 1, QUERIES, value + s * pitch,
                      pitch, output + q * pitch, pitch, true);
      });
    }
    copy(output, pitch, count, size, a.output.at(b, h) + q0 * a.output.row, a.output.row);
  }
}

int64_t row_forward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys), pitch = padded(a.size);
  return (2 * keys + QUERIES) * pitch + (a.size + KEYS_L1 + keys) * QUERIES +
         Support::floats(keys);
}

template <class Row, bool MASKED>
void row_backward_head(const Backward& a, int64_t b, int64_t h, int64_t, float* scratch) {
  const int64_t bh = b * a.heads + h;
  const Row row = row_of<Row>(a, h);
  const Dropout dropout(a.dropout, a.seed, bh);
  const BackwardHead head(a, b, h, scratch);
  const auto [keys, size, pitch, key, value, key_rows, value_rows, query, grad_output, grad_query,
              query_t, grad_output_t, rest] = head;
  GradRows grad_key(a.grad_key, b, h, a.keys, size, key_rows);
  GradRows grad_value(a.grad_value, b, h, a.keys, size, value_rows);
  float* mask = rest;                                  // (KEYS_L1, QUERIES)
  float* scores = mask + KEYS_L1 * QUERIES;            // (keys, QUERIES)
  float* weights = scores + keys * QUERIES;            // (keys, QUERIES)
  float* grads = weights + keys * QUERIES;             // (keys, QUERIES), of the weights
  Support support(grads + keys * QUERIES);
  // (keys, QUERIES): the slopes, later the gradients of the scores. Only the gradient of the
  // parameter needs the scores again.
  float* slopes = Row::learns ? support.end(keys) : scores;
  grad_key.initialize(keys), grad_value.initialize(keys);

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a.starts, a.ends, a.queries, a.keys, a.is_causal, b, q0, count);
    const int64_t first = w.first / LANES * LANES, last = padded(w.last);
    head.load_queries(a, b, h, q0, count);
    std::fill_n(grad_query, QUERIES * pitch, 0.0f);
    row_scores<MASKED>(a, b, h, q0, count, w, key, query_t, scores, mask);

    // The weights and slopes, and where they are not 0.
    Totals totals[GROUPS];
    Statistics all_statistics[GROUPS];
    for (int64_t q = 0; q < width; q += LANES) {
      const float* in = a.statistics + 3 * bh * a.queries + q0 + q;
      Statistics& statistics = all_statistics[q / LANES];
      for (Vec* x : {&statistics.top, &statistics.threshold, &statistics.factor}) {
        *x = load(in, count - q);
        in += a.queries;
      }
      const int64_t stop = w.stop(q, first, last);
      for (int64_t s0 = first; s0 < last; s0 += LANES) {
        IntVec nonzero{};
        for (int64_t s = s0; s < s0 + LANES; s++) {
          const int64_t at = s * QUERIES + q;
          const Entry entry = s < stop ? row.entry(load(scores + at), statistics) : Entry{};
          nonzero |= (entry.weight != 0) | (entry.slope != 0);
          totals[q / LANES].slope += entry.slope;
          if constexpr (Row::learns) {
            if (s >= stop) store(scores + at, broadcast(-INFINITE));
            row.add(load(scores + at), entry, statistics, totals[q / LANES]);
          }
          store(weights + at, entry.weight);
          store(slopes + at, entry.slope);
        }
        support.at(s0, q) = any(nonzero);
      }
    }
    support.for_each_key_group(first, last, width, [&](int64_t s, int64_t q, int64_t n) {
      small_product(LANES, n, size, value + s * pitch, pitch, 1, grad_output_t + q, QUERIES,
                    grads + s * QUERIES + q, QUERIES, false);
    });
    // The gradients of the scores, in `slopes`.
    for (int64_t q = 0; q < width; q += LANES) {
      Totals& total = totals[q / LANES];
      support.for_each_range(q, first, last, [&](int64_t s0, int64_t n) {
        for (int64_t s = s0; s < s0 + n; s++) {
          const int64_t at = s * QUERIES + q;
          Vec grad = load(grads + at);
          if (a.dropout > 0) {
            grad *= dropout.keep(dropout.key(s), q0 + q);
            store(grads + at, grad);
          }
          total.slope_grad += load(slopes + at) * grad;
          total.weight_grad += load(weights + at) * grad;
        }
      });
      const Vec mean = row.mean(total);
      Vec parameter_grad{};
      support.for_each_range(q, first, last, [&](int64_t s0, int64_t n) {
        for (int64_t s = s0; s < s0 + n; s++) {
          const int64_t at = s * QUERIES + q;
          const Vec p = load(weights + at), slope = load(slopes + at), grad = load(grads + at);
          if constexpr (Row::learns)
            parameter_grad += row.parameter_gradient(
                load(scores + at), {p, slope}, grad, all_statistics[q / LANES], total);
          store(slopes + at, row.gradient(slope, grad, mean));
          if (a.dropout > 0) store(weights + at, p * dropout.keep(dropout.key(s), q0 + q));
        }
      });
      if constexpr (Row::learns)
        a.row_parameter_sums[bh] += sum_lanes_double(parameter_grad);
    }
    const auto add = [&](const GradRows& grad, const float* factors, const float* inputs) {
      support.for_each_key_group(first, last, width, [&](int64_t s, int64_t q, int64_t n) {
        small_product(LANES, pitch, n, factors + s * QUERIES + q, QUERIES, 1,
                      inputs + q * pitch, pitch, grad.data + s * pitch, pitch, true);
      });
    };
    add(grad_value, weights, grad_output);
    add(grad_key, slopes, query);
    for (int64_t q = 0; q < width; q += LANES)
      support.for_each_range(q, first, last, [&](int64_t s, int64_t depth) {
        small_product(LANES, pitch, depth, slopes + s * QUERIES + q, 1, QUERIES, key + s * pitch,
                      pitch, grad_query + q * pitch, pitch, true);
      });
    head.write_grad_query(a, b, h, q0, count);
  }
  grad_key.write_back();
  grad_value.write_back();
}

int64_t row_backward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys);
  return BackwardHead::floats(a) + (KEYS_L1 + 4 * keys) * QUERIES + Support::floats(keys);
}

// Attention of the hypotheses [part * HYPOTHESES, (part + 1) * HYPOTHESES), with one query each. A
// vector lane holds one hypothesis.
template <class Row>
void row_step_part(const Attention& a, int64_t part, float* scratch) {
  const int64_t b0 = part * HYPOTHESES, last = std::min(b0 + HYPOTHESES, a.batch);
  const int64_t keys = padded(a.keys);  // scratch: the scores, (heads, keys, HYPOTHESES)
  if (last < b0 + HYPOTHESES) std::fill_n(scratch, a.heads * keys * HYPOTHESES, -INFINITE);
  for (int64_t b = b0; b < last; b++) {
    if (b + 1 < last) prefetch_hypothesis(a, b + 1);
    for (int64_t h = 0; h < a.heads; h++) {
      const float* query = a.query.at(b, h);
      float* scores = scratch + h * keys * HYPOTHESES + (b - b0);
      for (int64_t s0 = 0; s0 < keys; s0 += LANES) {
        const Vec x = a.scale * dot_products(a, b, h, s0, 0, a.keys, query);
        for (int i = 0; i < LANES; i++) scores[(s0 + i) * HYPOTHESES] = x[i];
      }
    }
  }
  for (int64_t h = 0; h < a.heads; h++) {
    const Row row = row_of<Row>(a, h);
    for (int64_t i = 0; i < HYPOTHESES; i += LANES) {
      float* scores = scratch + h * keys * HYPOTHESES + i;
      const Statistics statistics = row.reduce(Scores{scores, HYPOTHESES, 0, a.keys});
      for (int64_t s = 0; s < a.keys; s++) {
        float* at = scores + s * HYPOTHESES;
        store(at, row.entry(load(at), statistics).weight);
      }
    }
  }
  for (int64_t b = b0; b < last; b++)
    for (int64_t h = 0; h < a.heads; h++) {
      const float* weights = scratch + h * keys * HYPOTHESES + (b - b0);
      add_values<true>(a, b, h, 0, a.keys, weights, HYPOTHESES, 1, a.output.at(b, h));
    }
}

}  // namespace

extern "C" int row_attention_forward(const Attention* attention) {
  const Attention& a = *attention;
  return guarded([&] {
    dispatch_row(a.function, [&](auto* kind) {
      using Row = std::remove_pointer_t<decltype(kind)>;
      for_each_head(a, row_forward_scratch(a),
                 a.mask.data ? row_forward_head<Row, true> : row_forward_head<Row, false>);
    });
  });
}

extern "C" int row_attention_backward(const Attention* attention) {
  return guarded([&] {
    Backward a{*attention};
    std::vector<double> row_parameter_sums(a.batch * a.heads);
    a.row_parameter_sums = row_parameter_sums.data();
    dispatch_row(a.function, [&](auto* kind) {
      using Row = std::remove_pointer_t<decltype(kind)>;
      for_each_head(a, row_backward_scratch(a),
                 a.mask.data ? row_backward_head<Row, true> : row_backward_head<Row, false>);
    });
    if (a.grad_row_parameter)
      sum_partials(a.row_parameter_sums, a.batch * a.heads, 1, a.heads, 1, a.grad_row_parameter);
  });
}

// As `attention_step`, by a row function.
extern "C" int row_attention_step(const Attention* attention) {
  const Attention& a = *attention;
  if (!are_ancestors_valid(a)) return -1;
  const int64_t parts = (a.batch + HYPOTHESES - 1) / HYPOTHESES;
  return guarded([&] {
    dispatch_row(a.function, [&](auto* kind) {
      for_each_piece(parts, a.threads, a.heads * padded(a.keys) * HYPOTHESES,
                     [&](int64_t part, int64_t, float* scratch) {
        row_step_part<std::remove_pointer_t<decltype(kind)>>(a, part, scratch);
      });
    });
  });
}
