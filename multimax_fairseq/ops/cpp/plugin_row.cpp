// Attention by the row function of a plugin. `build.py` defines ROW_HEADER, the path of the header,
// and ROW_FUNCTION, the name of its struct.

#include "rows.h"

#include ROW_HEADER

namespace {

template <class Function>
void dispatch_row(int64_t, Function function) {
  function(static_cast<ROW_FUNCTION*>(nullptr));
}

}  // namespace

#include "row_attention.h"

// Whether the parameter has a gradient.
extern "C" int row_learns() { return ROW_FUNCTION::learns; }
