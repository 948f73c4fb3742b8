// The parameters of a replica as one flat sequence, wherever its layers keep them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/layer_layout.h"

namespace tagi_ddp {

// A run of parameters that lie together: the weights, or the biases, of one layer.
struct Block {
    float* mu = nullptr;
    float* var = nullptr;
    float* delta_mu = nullptr;
    float* delta_var = nullptr;
    size_t count = 0;
    int32_t* neg_var_counter = nullptr;  // counts weights only, as the engine does
};

class Parameters {
 public:
    // A layer in the engine's memory: it must have been verified, and must outlive this.
    void add_engine_layer(const std::string& name, EngineLayer* layer);
    // A layer in arrays that the caller keeps alive.
    void add_layer(const std::string& name, const Block& weights, const Block& biases);

    // Finds the blocks again, as the engine may have moved its vectors. Call before each use.
    // Throws std::runtime_error naming a layer whose number of parameters has changed.
    void refresh();
    // Changes whenever `refresh` finds them elsewhere.
    uint64_t version() const { return version_; }

    // From now on the deltas lie in `bucket`, [means | variances], 2 * size() floats, not in the
    // layers. Call after the last layer was added.
    void place_deltas(float* bucket);
    const float* bucket() const { return bucket_; }

    size_t size() const { return size_; }
    const std::vector<Block>& blocks() const { return blocks_; }
    // Where each block begins in the flat sequence.
    const std::vector<size_t>& offsets() const { return offsets_; }

    // Calls piece(block, first, count, at) for each part of the flat range [begin, begin + length)
    // that lies in one block: from position `first` of the block, at position `at` of the range.
    template <typename Piece>
    void visit(size_t begin, size_t length, Piece&& piece) const {
        const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), begin);
        size_t index = static_cast<size_t>(after - offsets_.begin()) - 1;
        for (size_t at = 0; at < length; ++index) {
            const size_t first = begin + at - offsets_[index];
            const size_t count = std::min(blocks_[index].count - first, length - at);
            if (count != 0) piece(blocks_[index], first, count, at);
            at += count;
        }
    }

    // The name of the first layer with a delta in the flat range [begin, begin + length) that is
    // NaN or infinite; empty when there is none.
    std::string first_not_finite(size_t begin, size_t length) const;
    // The negative variances that the last step met, by layer.
    std::vector<int32_t> negative_variances() const;

    // Copies means and variances to `gaussians`, [means | variances], 2 * size() floats, or back.
    void read_posterior(float* gaussians) const;
    void write_posterior(const float* gaussians) const;

    // Adds the deltas to `sums` ([means | variances], 2 * size() floats), or `sums` to the deltas;
    // for the layers whose flag in `layers` is set.
    void add_deltas_to(float* sums, const std::vector<bool>& layers) const;
    void add_to_deltas(const float* sums, const std::vector<bool>& layers) const;

 private:
    bool replace(size_t index, Block block);

    std::vector<std::string> names_;
    std::vector<EngineLayer*> engine_layers_;  // null for a layer in the caller's arrays
    std::vector<Block> blocks_;                // two a layer: weights, biases
    std::vector<size_t> offsets_;
    size_t size_ = 0;
    uint64_t version_ = 0;
    float* bucket_ = nullptr;  // where the deltas lie, if not in the layers
};

}  // namespace tagi_ddp
