// Attention whose scores are modulated before the softmax, forward and backward.
#pragma once

#include "dropout.h"
#include "modulator.h"
#include "vectors.h"
#include "windows.h"

struct Tensor4 {  // (batch, heads, length, size), the last dimension dense
  float* data;
  int64_t batch, head, row;
  float* at(int64_t b, int64_t h) const { return data + b * batch + h * head; }
};

struct Attention {
  int64_t batch, heads, queries, keys, size, threads;
  int64_t columns, table_row;  // of the table, 0 for none; from a head's row to the next
  int64_t is_causal;           // query t may attend to keys up to t
  float scale, dropout;        // dropout: the probability of dropping
  uint64_t seed;
  // Query t of sentence b may attend to keys starts[b, t] <= s < ends[b, t], in causal order too;
  // null: to all that this order allows.
  const int32_t *starts, *ends;
  const float* table;
  const float* sink;   // (heads,), the score of an entry without a key; null for none
  float* statistics;   // (batch, heads, 2, queries): the largest score, 1 / sum of exp; or null
  float* grad_table;   // (1 or heads, columns), as the table; or null
  float* grad_sink;    // (heads,), or null
  Mask mask;           // what the windows do not say
  Tensor4 query, key, value, output, grad_output, grad_query, grad_key, grad_value;
  // Of hypotheses that share keys, those of all steps (rows, heads, size): key s of hypothesis b is
  // that of row ancestors[b, s], (batch, keys). Null where each has its own.
  const int64_t* ancestors;
  int64_t rows;

  template <class Sigma>
  Sigma sigma(int64_t h) const {
    return Sigma(table + h * table_row);
  }
  float sink_of(int64_t h) const { return sink ? sink[h] : -INFINITE; }
};

namespace {

// Tiles of a block of queries stay in the L2 cache with KEYS rows, in the L1 cache with FEW_KEYS.
constexpr int64_t KEYS = 512, FEW_KEYS = 64;
constexpr int64_t FEW_QUERIES = 8;
constexpr int64_t HYPOTHESES = 16;  // that a thread takes at a time: neighbours share keys
constexpr int64_t LINE = 64 / sizeof(float);  // of the cache
// A head's floats that are asked for ahead: in the L2 cache, beside the tiles of the one before.
constexpr int64_t MOST_AHEAD = 1 << 17, NONE = -1;

// Whether products can take a head's rows as they are: rows of another stride may share cache lines.
inline bool are_dense(const Tensor4& t, int64_t rows, int64_t size) {
  return t.row == size && rows % LANES == 0 && size % LANES == 0;
}

// A head's rows, each padded to a multiple of LANES, as is their number: where they are, or copied.
const float* dense_rows(
    const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch) {
  if (are_dense(t, rows, size)) return t.at(b, h);
  if (rows % LANES || size % LANES) std::fill_n(scratch, padded(rows) * padded(size), 0.0f);
  copy(t.at(b, h), t.row, rows, size, scratch, padded(size));
  return scratch;
}

// The same of rows to add up in: where they are to be, or put there at the end.
struct Rows {
  const int64_t rows, size, stride;
  float *const out, *const data;
  int64_t begun = 0;  // so many rows hold sums, the others nothing yet
  Rows(const Tensor4& t, int64_t b, int64_t h, int64_t rows, int64_t size, float* scratch)
      : rows(rows), size(size), stride(t.row), out(t.at(b, h)),
        data(are_dense(t, rows, size) ? out : scratch) {}
  // Makes it so many rows that hold sums: zeros where nothing was added.
  void begin(int64_t count) {
    for (; begun < count; begun++) std::fill_n(data + begun * padded(size), padded(size), 0.0f);
  }
  void put_back() {
    begin(padded(rows));
    if (data != out) copy(data, padded(size), rows, size, out, stride);
  }
};

// What exp(score - top) is to be multiplied by: NaN beside a sink of NaN or inf; 0 for a query that
// may attend to nothing, and beside a score of NaN, whose output is NaN whatever it is.
inline float share(float sum, float sink) {
  if (!(sink < INFINITE)) return std::numeric_limits<float>::quiet_NaN();
  return sum > 0 ? 1 / sum : 0;
}

// Rows of a thread's next head, asked for a few at a time while this one is computed: products
// would wait for what lies in main memory.
class Ahead {
  struct Part {
    const float* data;
    int64_t row, rows;
  };
  Part parts[7];
  int64_t count = 0, size, step = 0, at = 0, end = 0;

 public:
  // `products` of each tile of scores call `some`.
  Ahead(const Attention& a, int64_t next, int64_t products,
        std::initializer_list<const Tensor4*> of_queries,
        std::initializer_list<const Tensor4*> of_keys)
      : size(a.size) {
    const int64_t most = std::max(a.queries, a.keys);
    const int64_t tensors = of_queries.size() + of_keys.size();
    if (next == NONE || tensors * most * size > MOST_AHEAD) return;
    const auto add = [&](const Tensor4* t, int64_t rows) {
      parts[count++] = {t->at(next / a.heads, next % a.heads), t->row, rows};
    };
    for (const Tensor4* t : of_queries) add(t, a.queries);
    for (const Tensor4* t : of_keys) add(t, a.keys);
    // As many tiles as in causal order: half of them, and those on the diagonal.
    const int64_t blocks = (a.queries + QUERIES - 1) / QUERIES;
    step = 1 + (most - 1) / (products * (padded(a.keys) / LANES) * (blocks + 1) / 2);
    end = most;
  }
  void some() {
    for (const int64_t stop = std::min(at + step, end); at < stop; at++)
      for (const Part* part = parts; part < parts + count; part++)
        for (int64_t d = 0; at < part->rows && d < size; d += LINE)
          __builtin_prefetch(part->data + at * part->row + d, 0, 1);
  }
};

template <class Sigma, bool MASKED>
void forward_head(const Attention& a, int64_t b, int64_t h, int64_t next, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size, pitch = padded(size);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  const Dropout dropout(a.dropout, a.seed, bh);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, pitch)
  float* rows = scratch + keys * pitch;
  const float* value = dense_rows(a.value, b, h, a.keys, size, rows);  // (keys, pitch)
  float* query = rows + keys * pitch;        // (size, QUERIES), scaled
  float* output = query + size * QUERIES;    // (QUERIES, pitch)
  float* scores = output + QUERIES * pitch;  // (KEYS, QUERIES)
  float* mask = scores + KEYS * QUERIES;     // (KEYS, QUERIES), if there is a mask
  Ahead ahead(a, next, 1, {&a.query}, {&a.key, &a.value});

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a.starts, a.ends, a.queries, a.keys, a.is_causal, b, q0, count);
    if (count < width) std::fill(query, output, 0.0f);
    transpose(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, QUERIES,
              a.scale);
    alignas(64) float top[QUERIES], sum[QUERIES], shrink[QUERIES];
    std::fill(top, top + QUERIES, sink);
    std::fill(sum, sum + QUERIES, sink == -INFINITE ? 0.0f : 1.0f);
    const int64_t first = w.first / LANES * LANES;
    if (first >= w.last) std::fill(output, scores, 0.0f);
    for (int64_t s0 = first, s1; s0 < w.last; s0 = s1) {
      s1 = std::min(s0 + KEYS, padded(w.last));
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        ahead.some();
        small_product(LANES, width - q, size, key + s * pitch, pitch, 1, query + q, QUERIES,
                      scores + (s - s0) * QUERIES + q, QUERIES, false);
      });
      if (MASKED) mask_tile(a.mask, a.keys, b, h, q0, count, s0, s1, mask);
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
        most = base_of(most);
        Vec parts[4] = {};  // shorter sums, which round less
        for (int64_t s = s0; s < stop; s++) {
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
        for (int64_t q = 0; q < width; q++)
          for (int64_t d = 0; d < pitch; d += LANES) {
            float* at = output + q * pitch + d;
            store(at, load(at) * shrink[q]);
          }
      for (int64_t s = s0; s < s1; s += FEW_KEYS)
        for (int64_t q = 0; q < width; q += LANES) {
          const int64_t some = w.stop(q, s, std::min(s + FEW_KEYS, s1)) - s;
          if (some || s == first)
            small_product(LANES, pitch, some, scores + (s - s0) * QUERIES + q, 1, QUERIES,
                          value + s * pitch, pitch, output + q * pitch, pitch, s > first);
        }
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
    for (int64_t q = 0; q < count; q++)
      copy(output + q * pitch, pitch, 1, size, out + q * a.output.row, a.output.row, inverse[q]);
  }
}

int64_t forward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys), pitch = padded(a.size), tiles = a.mask.data ? 2 : 1;
  return (2 * keys + QUERIES) * pitch + (a.size + tiles * KEYS) * QUERIES;
}

// Where key or value s of row b stands.
inline const float* row_of(
    const Attention& a, const Tensor4& t, int64_t b, int64_t h, int64_t s) {
  if (!a.ancestors) return t.at(b, h) + s * t.row;
  return t.at(0, h) + a.ancestors[b * a.keys + s] * t.row;
}

// Decoding: too few queries to fill a tile. Keys are read where they are.
template <class Sigma>
void forward_few(const Attention& a, int64_t b, int64_t h, int64_t, float* scratch) {
  const int64_t size = a.size, length = padded(a.keys);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  for (int64_t t = 0; t < a.queries; t++) {
    const int64_t at = b * a.queries + t;
    const int64_t first = a.starts ? a.starts[at] : 0;
    const int64_t last = a.ends ? a.ends[at] : causal_end(t, a.keys, a.is_causal);
    const float* query = a.query.at(b, h) + t * a.query.row;
    float* out = a.output.at(b, h) + t * a.output.row;
    Vec most = all(-INFINITE);
    for (int64_t s0 = 0; s0 < length; s0 += LANES) {
      Vec products[LANES];
      for (int64_t s = s0; s < s0 + LANES; s++) {
        Vec sum{};
        if (s >= first && s < last) {
          const float* key = row_of(a, a.key, b, h, s);
          for (int64_t d = 0; d < size; d += LANES) sum += load(query + d) * load(key + d);
        }
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
    const float inverse = share(rest + sum_of(sums), sink);
    const auto put = [&]<int parts>(std::integral_constant<int, parts>, int64_t d) {
      const auto add = [&](int64_t s, Vec* sums) {
        const float* value = row_of(a, a.value, b, h, s) + d;
        for (int i = 0; i < parts; i++) sums[i] += scratch[s] * load(value + i * LANES);
      };
      // Two sums, of which each waits for its own last product alone.
      Vec even[parts] = {}, odd[parts] = {};
      int64_t s = first;
      for (; s + 1 < last; s += 2) add(s, even), add(s + 1, odd);
      if (s < last) add(s, even);
      for (int i = 0; i < parts; i++) store(out + d + i * LANES, (even[i] + odd[i]) * inverse);
    };
    int64_t d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES) put(std::integral_constant<int, 4>(), d);
    for (; d + 2 * LANES <= size; d += 2 * LANES) put(std::integral_constant<int, 2>(), d);
    if (d < size) put(std::integral_constant<int, 1>(), d);
  }
}

// What the gradients of the parameters are added up from, by a head of a sentence.
struct Backward : Attention {
  double *tables, *sinks;  // (batch, heads, COLUMNS), (batch, heads)
};

template <class Sigma, bool MASKED>
void backward_head(const Backward& a, int64_t b, int64_t h, int64_t next, float* scratch) {
  const int64_t bh = b * a.heads + h, keys = padded(a.keys), size = a.size, pitch = padded(size);
  const Sigma sigma = a.sigma<Sigma>(h);
  const float sink = a.sink_of(h);
  const Dropout dropout(a.dropout, a.seed, bh);
  const float* key = dense_rows(a.key, b, h, a.keys, size, scratch);  // (keys, pitch)
  float* rows = scratch + keys * pitch;
  const float* value = dense_rows(a.value, b, h, a.keys, size, rows);  // (keys, pitch)
  Rows grad_key(a.grad_key, b, h, a.keys, size, rows + keys * pitch);
  Rows grad_value(a.grad_value, b, h, a.keys, size, rows + 2 * keys * pitch);
  float* query = rows + 3 * keys * pitch;              // (QUERIES, pitch), scaled
  float* grad_output = query + QUERIES * pitch;        // (QUERIES, pitch)
  float* grad_query = grad_output + QUERIES * pitch;   // (QUERIES, pitch)
  float* query_t = grad_query + QUERIES * pitch;       // (size, QUERIES)
  float* grad_output_t = query_t + size * QUERIES;     // (size, QUERIES)
  float* scores = grad_output_t + size * QUERIES;      // (keys, QUERIES), then their gradients
  float* probs = scores + keys * QUERIES;              // (keys, QUERIES)
  float* grad_probs = probs + keys * QUERIES;          // (keys, QUERIES)
  float* mask = grad_probs + keys * QUERIES;           // (FEW_KEYS, QUERIES), if there is a mask
  Ahead ahead(a, next, 4, {&a.query, &a.grad_output, &a.grad_query},
              {&a.key, &a.value, &a.grad_key, &a.grad_value});

  for (int64_t q0 = 0; q0 < a.queries; q0 += QUERIES) {
    const int64_t count = std::min(QUERIES, a.queries - q0), width = padded(count);
    const Window w = window(a.starts, a.ends, a.queries, a.keys, a.is_causal, b, q0, count);
    const int64_t first = w.first / LANES * LANES, last = padded(w.last);
    grad_key.begin(first), grad_value.begin(first);
    if (first >= last) std::fill(grad_query, query_t, 0.0f);
    if (count < width || size < pitch) std::fill(query, scores, 0.0f);
    const float* grads = a.grad_output.at(b, h) + q0 * a.grad_output.row;
    copy(a.query.at(b, h) + q0 * a.query.row, a.query.row, count, size, query, pitch, a.scale);
    transpose(query, pitch, count, size, query_t, QUERIES);
    copy(grads, a.grad_output.row, count, size, grad_output, pitch);
    transpose(grad_output, pitch, count, size, grad_output_t, QUERIES);
    alignas(64) float tops[QUERIES] = {}, inverses[QUERIES] = {}, means[QUERIES] = {};
    const float* statistics = a.statistics + 2 * bh * a.queries + q0;
    std::copy_n(statistics, count, tops);
    std::copy_n(statistics + a.queries, count, inverses);

    // The probabilities, and the mean of their gradients: formed of the very numbers that it is
    // subtracted from, because what is left of them has to sum to zero. The product of the output
    // and its gradient is the same, but for the rounding of the output.
    for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
      s1 = std::min(s0 + FEW_KEYS, last);
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        ahead.some();
        small_product(LANES, width - q, size, key + s * pitch, pitch, 1, query_t + q, QUERIES,
                      scores + s * QUERIES + q, QUERIES, false);
      });
      w.each(s0, s1, [&](int64_t s, int64_t q) {
        ahead.some();
        small_product(LANES, width - q, size, value + s * pitch, pitch, 1, grad_output_t + q,
                      QUERIES, grad_probs + s * QUERIES + q, QUERIES, false);
      });
      if (MASKED) mask_tile(a.mask, a.keys, b, h, q0, count, s0, s1, mask);
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
        a.sinks[bh] -= std::exp(sink - tops[q]) * inverses[q] * means[q];
    for (int64_t s0 = first, s1; s0 < last; s0 = s1) {
      s1 = std::min(s0 + FEW_KEYS, last);
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
      sigma.add(sums, a.tables + bh * COLUMNS);
      const auto add = [&](const Rows& grad, const float* weights, const float* of_queries) {
        w.each(s0, s1, [&](int64_t s, int64_t q) {
          ahead.some();
          small_product(LANES, pitch, width - q, weights + s * QUERIES + q, QUERIES, 1,
                        of_queries + q * pitch, pitch, grad.data + s * pitch, pitch,
                        s < grad.begun);
        });
      };
      add(grad_value, probs, grad_output);
      add(grad_key, scores, query);
      for (int64_t q = 0; q < width; q += LANES)
        small_product(LANES, pitch, w.stop(q, s0, s1) - s0, scores + s0 * QUERIES + q, 1, QUERIES,
                      key + s0 * pitch, pitch, grad_query + q * pitch, pitch, s0 > first);
    }
    grad_key.begun = grad_value.begun = std::max(grad_key.begun, last);
    copy(grad_query, pitch, count, size, a.grad_query.at(b, h) + q0 * a.grad_query.row,
         a.grad_query.row, a.scale);
  }
  grad_key.put_back();
  grad_value.put_back();
}

int64_t backward_scratch(const Attention& a) {
  const int64_t keys = padded(a.keys), pitch = padded(a.size), tile = a.mask.data ? FEW_KEYS : 0;
  return (4 * keys + 3 * QUERIES) * pitch + (2 * a.size + 3 * keys + tile) * QUERIES;
}

// A thread takes the next piece of work when it is free: sentences differ in length, and processors
// may have other work. What is formed of a piece is the same in any thread.
template <class Work>
void every(int64_t count, int64_t threads, int64_t scratch_size, Work work) {
  threads = std::min(threads, count);
  // Not in the threads, where running out of memory would end the process.
  const Buffer scratch(threads * padded(scratch_size));
  std::atomic<int64_t> first = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++)
    for (int64_t j = first++, next; j < count; j = next) {
      next = first++;
      work(j, next < count ? next : NONE, scratch + i * padded(scratch_size));
    }
}

template <class Kind, class Head>
void every_head(const Kind& a, int64_t scratch_size, Head head) {
  every(a.batch * a.heads, a.threads, scratch_size, [&](int64_t j, int64_t next, float* scratch) {
    head(a, j / a.heads, j % a.heads, next, scratch);
  });
}

// Asks for the keys and values of hypothesis b that are not those of the one before, which have been
// asked for: they lie where they were formed, all over the memory.
void ask_for(const Attention& a, int64_t b) {
  const int64_t *own = a.ancestors + b * a.keys, *before = own - a.keys;
  for (int64_t s = 0; s < a.keys; s++) {
    if (own[s] == before[s]) continue;
    const float *key = row_of(a, a.key, b, 0, s), *value = row_of(a, a.value, b, 0, s);
    for (int64_t i = 0; i < a.key.row; i += LINE) {
      __builtin_prefetch(key + i);
      __builtin_prefetch(value + i);
    }
  }
}

// Attention of HYPOTHESES hypotheses, this part of them.
template <class Sigma>
void step_part(const Attention& a, int64_t part, float* scratch) {
  const int64_t last = std::min((part + 1) * HYPOTHESES, a.batch);
  for (int64_t b = part * HYPOTHESES; b < last; b++) {
    if (b + 1 < last) ask_for(a, b + 1);
    for (int64_t h = 0; h < a.heads; h++) forward_few<Sigma>(a, b, h, NONE, scratch);
  }
}

}  // namespace

// Attention of one query a hypothesis. Returns 1; 0 if it ran out of memory; -1 if an ancestor is
// none of the rows.
extern "C" int attention_step(const Attention* attention) {
  const Attention& a = *attention;
  for (int64_t i = 0; i < a.batch * a.keys; i++)
    if (a.ancestors[i] < 0 || a.ancestors[i] >= a.rows) return -1;
  const int64_t parts = (a.batch + HYPOTHESES - 1) / HYPOTHESES;
  return guarded([&] {
    with_modulator(a.columns, [&](auto* kind) {
      every(parts, a.threads, padded(a.keys), [&](int64_t part, int64_t, float* scratch) {
        step_part<std::remove_pointer_t<decltype(kind)>>(a, part, scratch);
      });
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
  return guarded([&] {
    Backward a{*attention};
    const int64_t heads = a.batch * a.heads;
    std::vector<double> tables(heads * COLUMNS), sinks(heads);
    a.tables = tables.data(), a.sinks = sinks.data();
    with_modulator(a.columns, [&](auto* kind) {
      using Sigma = std::remove_pointer_t<decltype(kind)>;
      every_head(a, backward_scratch(a),
                 a.mask.data ? backward_head<Sigma, true> : backward_head<Sigma, false>);
    });
    if (a.grad_table)
      add_up(a.tables, heads, COLUMNS, a.table_row ? a.heads : 1, a.columns, a.grad_table);
    if (a.grad_sink) add_up(a.sinks, heads, 1, a.heads, 1, a.grad_sink);
  });
}
