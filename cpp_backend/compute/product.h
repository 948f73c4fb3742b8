// Products of small matrices.
#pragma once

#include <cstddef>

namespace tagi_ddp {

// A matrix whose element (r, k) is data[r * row + k * step].
struct Factor {
    const float* data;
    size_t row;
    size_t step;
};

// The term that is added to a product: nothing, a padded row to each of its rows, or `out` itself.
enum class AddTo { zero, row, present };

// out = left * right + the term that `add_to` selects. left is [rows, depth]. right, [depth,
// columns], and out, [rows, columns], have rows `right_row` and `out_row` floats apart.
// padded(columns) floats of each row are read and written.
void product(size_t rows, size_t depth, size_t columns, Factor left, const float* right,
             size_t right_row, float* out, size_t out_row, AddTo add_to,
             const float* row = nullptr);

}  // namespace tagi_ddp
