// The loops of product.cpp; see twice.h.

// Computes `Rows` rows by `Vectors` vectors of the product, in registers.
template <int Rows, int Vectors>
TAGI_DDP_INLINE void tile(size_t depth, const Factor& left, const float* right, size_t right_row,
                          float* out, size_t out_row, AddTo add_to, const float* row) {
    Vector sums[Rows][Vectors];
    for (int r = 0; r < Rows; ++r) {
        const float* begin = add_to == AddTo::present ? out + r * out_row : row;
        for (int v = 0; v < Vectors; ++v) {
            sums[r][v] = add_to == AddTo::zero ? broadcast(0.0f) : load(begin + v * lanes);
        }
    }
    const float* factor = left.data;
    for (size_t k = 0; k < depth; ++k, factor += left.step, right += right_row) {
        Vector part[Vectors];
        for (int v = 0; v < Vectors; ++v) part[v] = load(right + v * lanes);
        for (int r = 0; r < Rows; ++r) {
            const Vector times = broadcast(factor[r * left.row]);
            for (int v = 0; v < Vectors; ++v) sums[r][v] += times * part[v];
        }
    }
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) store(out + r * out_row + v * lanes, sums[r][v]);
    }
}

// Computes `Rows` rows of the product, `Most` vectors at a time, then fewer.
template <int Rows, int Most>
TAGI_DDP_INLINE void stripe(size_t depth, size_t vectors, const Factor& left, const float* right,
                            size_t right_row, float* out, size_t out_row, AddTo add_to,
                            const float* row) {
    size_t done = 0;
    const auto at = [&](auto* data) { return data == nullptr ? nullptr : data + done * lanes; };
    for (; done + Most <= vectors; done += Most) {
        tile<Rows, Most>(depth, left, at(right), right_row, at(out), out_row, add_to, at(row));
    }
    if constexpr (Most > 2) {
        for (; done + 2 <= vectors; done += 2) {
            tile<Rows, 2>(depth, left, at(right), right_row, at(out), out_row, add_to, at(row));
        }
    }
    for (; done < vectors; ++done) {
        tile<Rows, 1>(depth, left, at(right), right_row, at(out), out_row, add_to, at(row));
    }
}

static void multiply(size_t rows, size_t depth, size_t columns, Factor left, const float* right,
                     size_t right_row, float* out, size_t out_row, AddTo add_to, const float* row) {
    const size_t vectors = padded(columns) / lanes;
    size_t done = 0;
    for (; done + 4 <= rows; done += 4) {
        stripe<4, 2>(depth, vectors, left, right, right_row, out, out_row, add_to, row);
        left.data += 4 * left.row;
        out += 4 * out_row;
    }
    for (; done < rows; ++done) {
        stripe<1, 6>(depth, vectors, left, right, right_row, out, out_row, add_to, row);
        left.data += left.row;
        out += out_row;
    }
}
