// Kernels for float32 on x86: attention with MultiMax or with a row function such as entmax, output
// layer, output loss, top-k outputs for beam search, modulator and dropout.
//
// The kernels work on tiles of scores that stay in the cache: a tile is modulated, exponentiated
// and multiplied before the next tile is computed. Tiles are transposed, (keys, queries) or
// (classes, tokens). Each vector lane then holds one query or token, so softmax statistics need no
// reduction across lanes, and only one operand of all matrix products needs another layout.
//
// Sums over many tiles use double. No sum depends on the order in which threads finish, so results
// are identical to the last bit between runs with the same number of threads.

#include "attention.h"
#include "best.h"
#include "dropout.h"
#include "modulator.h"
#include "output.h"
#include "row_functions.h"

#include "row_attention.h"  // needs `dispatch_row`

// The sizes of the structures that Python fills. ops/native.py compares them with its own.
extern "C" {
int64_t structure_sizes[] = {
    sizeof(Mask), sizeof(Attention),   sizeof(OutputLoss), sizeof(Projection), sizeof(Best),
    sizeof(BestOutputs), sizeof(Drop), sizeof(Modulation), sizeof(Tails)};
}

// Selects the matrix products: `brgemm` of oneDNN with its release function, or `sgemm` of BLAS.
// Returns 1 if one of them works. Python calls this function before any kernel.
extern "C" int start(Brgemm of_onednn, BrgemmRelease release, Sgemm of_blas) {
  brgemm = of_onednn, brgemm_release = release, sgemm = of_blas;
  if (!brgemm) return sgemm != nullptr;
  const float one = 1;
  float out = 0;
  try {
    product(1, 1, 1, &one, 1, &one, 1, &out, 1, false);
    release_products();
  } catch (const std::exception&) {
    return 0;
  }
  return out == 1;
}
