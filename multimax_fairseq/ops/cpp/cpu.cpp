// MultiMax for float32 on x86: attention, the output-layer loss, the output layer, what beam search
// chooses of it, the modulator, dropout.
//
// Everything is blocked so that a tile of scores is modulated, exponentiated and used in the next
// matrix product while it is in the cache. Tiles are kept transposed, (keys, queries) or (classes,
// tokens): then every statistic of a softmax runs along the vector lanes, and all but one of the
// operands of the matrix products lie in memory as the product wants them.
//
// Sums over many tiles are kept in double. No sum depends on which thread is first, so that a result
// is the same bit for bit at every run with as many threads.

#include "attention.h"
#include "best.h"
#include "dropout.h"
#include "modulator.h"
#include "output.h"

// The structures that Python fills; ops/native.py compares their sizes with its own.
extern "C" {
int64_t structure_sizes[] = {
    sizeof(Mask), sizeof(Attention),   sizeof(OutputLoss), sizeof(Projection), sizeof(Best),
    sizeof(BestOutputs), sizeof(Drop), sizeof(Modulation), sizeof(Tails)};
}

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
