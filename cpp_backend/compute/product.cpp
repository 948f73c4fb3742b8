#include "compute/product.h"

#define TAGI_DDP_LOOPS "compute/product_loops.h"
#include "compute/twice.h"

namespace tagi_ddp {

void product(size_t rows, size_t depth, size_t columns, Factor left, const float* right,
             size_t right_row, float* out, size_t out_row, AddTo add_to, const float* row) {
    TAGI_DDP_PICK(multiply)
    (rows, depth, columns, left, right, right_row, out, out_row, add_to, row);
}

}  // namespace tagi_ddp
