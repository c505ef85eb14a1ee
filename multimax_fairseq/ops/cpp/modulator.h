// The modulator: sigma, its derivatives, where it turns, and the kernels for these alone.
#pragma once

#include "vectors.h"

namespace {

// The columns of a parameter table. The last four are a monotone modulator's alone: below LOW_TURN
// it is x + LOW_OFFSET, above HIGH_TURN it is HIGH_LEVEL.
enum {
  LOW_C1, LOW_C2, LOW_T1, LOW_T2, HIGH_C1, HIGH_C2, HIGH_T1, HIGH_T2,
  LOW_TURN, HIGH_TURN, LOW_OFFSET, HIGH_LEVEL, COLUMNS
};
constexpr int64_t PLAIN_COLUMNS = LOW_TURN;

// What the gradients of the parameters are formed from: sums of the incoming gradient times
// (is below, distance, distance^2), for each threshold where it is needed.
struct Sums {
  Vec low_is{}, low_1{}, low_2{}, low_22{}, high_is{}, high_1{}, high_2{}, high_22{};
  Vec below_turn{}, above_turn{};
};

struct NoModulator {
  explicit NoModulator(const float*) {}
  Vec value(Vec x) const { return x; }
  Vec backward(Vec, Vec grad, Sums&) const { return grad; }
  void add(const Sums&, double*) const {}
};

struct Modulator {
  float p[PLAIN_COLUMNS];
  explicit Modulator(const float* table) { std::copy(table, table + PLAIN_COLUMNS, p); }

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

struct MonotoneModulator {
  Modulator inside;
  float low_turn, high_turn, low_offset, high_level;
  explicit MonotoneModulator(const float* table)
      : inside(table),
        low_turn(table[LOW_TURN]),
        high_turn(table[HIGH_TURN]),
        low_offset(table[LOW_OFFSET]),
        high_level(table[HIGH_LEVEL]) {}

  IntVec is_below(Vec x) const { return x < all(low_turn); }
  // A score of inf stays what it is, so that an overflow is not hidden.
  IntVec is_above(Vec x) const { return (x > all(high_turn)) & (x < all(INFINITE)); }

  Vec value(Vec x) const {
    const Vec z = is_below(x) ? x + low_offset : inside.value(x);
    return is_above(x) ? all(high_level) : z;
  }

  Vec backward(Vec x, Vec grad, Sums& sums) const {
    const Vec below = is_below(x) ? grad : Vec{}, above = is_above(x) ? grad : Vec{};
    sums.below_turn += below;
    sums.above_turn += above;
    return inside.backward(x, (is_below(x) | is_above(x)) ? Vec{} : grad, sums) + below;
  }

  void add(const Sums& s, double* out) const {
    inside.add(s, out);
    out[LOW_OFFSET] += total(s.below_turn);
    out[HIGH_LEVEL] += total(s.above_turn);
  }
};

// Calls a function of a modulator's type, for a table of these many columns: 0 where there is none.
template <class Function>
void with_modulator(int64_t columns, Function function) {
  if (columns == COLUMNS)
    function(static_cast<MonotoneModulator*>(nullptr));
  else if (columns)
    function(static_cast<Modulator*>(nullptr));
  else
    function(static_cast<NoModulator*>(nullptr));
}

// out (rows, columns): the sums of parts (count, row), in which the rows take turns.
void add_up(
    const double* parts, int64_t count, int64_t row, int64_t rows, int64_t columns, float* out) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      double sum = 0;
      for (int64_t i = r; i < count; i += rows) sum += parts[i * row + c];
      out[r * columns + c] = static_cast<float>(sum);
    }
}

}  // namespace

struct Modulation {
  int64_t count, inner, heads, threads;  // scores, dense; inner of them a head, in turn
  int64_t columns;
  const float* table;                    // (heads, columns)
  const float *scores, *grad;            // grad is null for the values
  float* out;                            // the modulated scores, or the gradient by scores
  float* grad_table;                     // (heads, columns), if there is a grad
};

namespace {

template <class Sigma>
void modulate(const Modulation& m) {
  const int64_t pieces = (m.count + m.inner - 1) / m.inner;
  std::vector<double> tables(m.grad ? pieces * COLUMNS : 0);
#pragma omp parallel for num_threads(std::min(m.threads, pieces)) schedule(static)
  for (int64_t i = 0; i < pieces; i++) {
    const Sigma sigma(m.table + i % m.heads * m.columns);
    constexpr int64_t BLOCK = 64 * LANES;
    const int64_t end = std::min((i + 1) * m.inner, m.count);
    for (int64_t j0 = i * m.inner; j0 < end; j0 += BLOCK) {
      const int64_t j1 = std::min(j0 + BLOCK, end);
      Sums sums;
      for (int64_t j = j0; j < j1; j += LANES) {
        const Vec x = load(m.scores + j, j1 - j);
        store(m.out + j,
              m.grad ? sigma.backward(x, load(m.grad + j, j1 - j), sums) : sigma.value(x), j1 - j);
      }
      if (m.grad) sigma.add(sums, &tables[i * COLUMNS]);
    }
  }
  if (m.grad) add_up(tables.data(), pieces, COLUMNS, m.heads, m.columns, m.grad_table);
}

}  // namespace

extern "C" int modulation(const Modulation* modulation) {
  return guarded([&] {
    with_modulator(modulation->columns, [&](auto* kind) {
      modulate<std::remove_pointer_t<decltype(kind)>>(*modulation);
    });
  });
}

struct Tails {
  int64_t rows;
  const float* table;  // (rows, PLAIN_COLUMNS)
  float* out;          // (rows, 4): the columns of a table from LOW_TURN on
  float* jacobian;     // (rows, 4, PLAIN_COLUMNS): their derivatives by the columns before
};

namespace {

// The last point up to 0 below which sigma falls with rising x, and sigma there, with their
// derivatives by the parameters; -inf and 0 where there is none.
struct Turn {
  double at = -INFINITE, value = 0;
  double at_by[PLAIN_COLUMNS] = {}, value_by[PLAIN_COLUMNS] = {};
};

Turn low_turn(const double* p) {
  const double thresholds[] = {p[LOW_T1], p[LOW_T2], p[HIGH_T1], p[HIGH_T2]};
  double edges[6] = {-MAX_DISTANCE, 0, 0, 0, 0, MAX_DISTANCE};
  std::copy_n(thresholds, 4, edges + 1);
  std::sort(edges + 1, edges + 5);
  // From 0 downwards, the first of the pieces between neighbouring thresholds where sigma falls.
  // There, sigma' is level + slope x.
  for (int piece = 4; piece >= 0; piece--) {
    const double left = edges[piece], right = edges[piece + 1], end = std::min(right, 0.0);
    const bool low_1 = right <= p[LOW_T1], low_2 = right <= p[LOW_T2];
    const bool high_1 = left >= p[HIGH_T1], high_2 = left >= p[HIGH_T2];
    const double level = 1 - low_1 * p[LOW_C1] - 2 * low_2 * p[LOW_C2] * p[LOW_T2] +
                         high_1 * p[HIGH_C1] - 2 * high_2 * p[HIGH_C2] * p[HIGH_T2];
    const double slope = 2 * (low_2 * p[LOW_C2] + high_2 * p[HIGH_C2]);
    const bool falls_at_end = level + slope * end < 0;
    if (left >= end || !(falls_at_end || level + slope * left < 0)) continue;
    Turn turn;
    const double x = turn.at = falls_at_end ? end : std::clamp(-level / slope, left, end);
    const double below_1 = low_1 * (p[LOW_T1] - x), below_2 = low_2 * (p[LOW_T2] - x);
    const double above_1 = high_1 * (x - p[HIGH_T1]), above_2 = high_2 * (x - p[HIGH_T2]);
    turn.value = x + p[LOW_C1] * below_1 + p[LOW_C2] * below_2 * below_2 + p[HIGH_C1] * above_1 +
                 p[HIGH_C2] * above_2 * above_2;
    double* at_by = turn.at_by;
    if (!falls_at_end) {
      at_by[LOW_C1] = low_1 / slope;
      at_by[LOW_C2] = 2 * below_2 / slope;
      at_by[LOW_T2] = 2 * low_2 * p[LOW_C2] / slope;
      at_by[HIGH_C1] = -high_1 / slope;
      at_by[HIGH_C2] = -2 * above_2 / slope;
      at_by[HIGH_T2] = 2 * high_2 * p[HIGH_C2] / slope;
    } else if (right <= 0) {  // it moves with the threshold that it lies on
      const int64_t columns[] = {LOW_T1, LOW_T2, HIGH_T1, HIGH_T2};
      at_by[columns[std::find(thresholds, thresholds + 3, right) - thresholds]] = 1;
    }
    const double by_parameters[] = {
        below_1, below_2 * below_2, low_1 * p[LOW_C1], 2 * p[LOW_C2] * below_2,
        above_1, above_2 * above_2, -high_1 * p[HIGH_C1], -2 * p[HIGH_C2] * above_2};
    for (int64_t i = 0; i < PLAIN_COLUMNS; i++)
      turn.value_by[i] = by_parameters[i] + (level + slope * x) * at_by[i];
    return turn;
  }
  return {};
}

}  // namespace

extern "C" int tails(const Tails* tails) {
  constexpr int64_t HALF = PLAIN_COLUMNS / 2;
  for (int64_t row = 0; row < tails->rows; row++) {
    const float* table = tails->table + row * PLAIN_COLUMNS;
    float* out = tails->out + row * HALF;
    float* jacobian = tails->jacobian + row * HALF * PLAIN_COLUMNS;
    // The high side of sigma(x) is the low side of -sigma(-x).
    double low[PLAIN_COLUMNS], high[PLAIN_COLUMNS];
    for (int64_t i = 0; i < PLAIN_COLUMNS; i++) {
      low[i] = table[i];
      high[i] = -table[(i + HALF) % PLAIN_COLUMNS];
    }
    const Turn below = low_turn(low), above = low_turn(high);
    const bool turns = below.at > -INFINITE;
    out[0] = below.at;
    out[1] = -above.at;
    out[2] = turns ? below.value - below.at : 0;
    out[3] = -above.value;
    for (int64_t i = 0; i < PLAIN_COLUMNS; i++) {
      const int64_t mirrored = (i + HALF) % PLAIN_COLUMNS;
      jacobian[i] = below.at_by[i];
      jacobian[PLAIN_COLUMNS + i] = above.at_by[mirrored];
      jacobian[2 * PLAIN_COLUMNS + i] = below.value_by[i] - below.at_by[i];
      jacobian[3 * PLAIN_COLUMNS + i] = above.value_by[mirrored];
    }
  }
  return 1;
}
