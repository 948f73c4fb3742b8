// The parameters of a replica as one flat sequence, in the memory of its layers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/buffer.h"
#include "engine/engine_memory.h"

namespace tagi_ddp {

// The weights, or the biases, of one layer.
struct Block {
    float* mu = nullptr;
    float* var = nullptr;
    float* delta_mu = nullptr;
    float* delta_var = nullptr;
    size_t count = 0;
    int32_t* neg_var_counter = nullptr;  // as in the engine, only for weights
    int64_t rows = 1;                    // of a sample, for `Parameters::cap_factor`
};

// A layer in the engine's memory, which has been verified and outlives this.
struct EngineLayer {
    EngineVectors* vectors = nullptr;    // null for a layer in the caller's arrays
    int32_t* neg_var_counter = nullptr;  // of corrected variances of weights
    bool has_biases = true;              // if false, the engine does not use vectors of biases
    int64_t rows = 1;                    // of a sample, for the cap factor
};

class Parameters {
 public:
    void add_engine_layer(const std::string& name, const EngineLayer& layer);
    // Adds a layer in arrays that the caller keeps alive.
    void add_layer(const std::string& name, const Block& weights, const Block& biases);

    // Reads the addresses of the engine's vectors again, which may have moved. Call before each
    // use. Throws std::runtime_error that names a layer whose number of parameters has changed.
    void refresh();
    // Changes if `refresh` finds that vectors have moved.
    uint64_t version() const { return version_; }

    // Moves the deltas from the layers to `bucket`, [means | variances], 2 * size() floats. Call
    // after the last layer has been added.
    void place_deltas(float* bucket);
    const float* bucket() const { return bucket_; }

    // The factor that limits a step of `batch` samples to sqrt(var) / factor, in a layer that sees
    // so many rows of a sample: the chosen one or, as in the engine, that of a batch of all these
    // rows; 1 if there are none.
    float cap_factor(int64_t batch, int64_t rows = 1) const;
    // A factor for all batches and layers; 0: almost no limit. Without a value: the engine's.
    std::optional<float> chosen_cap_factor;

    size_t size() const { return size_; }
    const std::vector<Block>& blocks() const { return blocks_; }
    // The positions in the flat sequence at which the blocks begin.
    const std::vector<size_t>& offsets() const { return offsets_; }

    // Calls piece(block, first, count, at) for each part of the flat range that is in one block: it
    // begins at position `first` of the block, and at position `at` of the range.
    template <typename Piece>
    void visit(Shard range, Piece&& piece) const {
        const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), range.begin);
        size_t index = static_cast<size_t>(after - offsets_.begin()) - 1;
        for (size_t at = 0; at < range.count; ++index) {
            const size_t first = range.begin + at - offsets_[index];
            const size_t count = std::min(blocks_[index].count - first, range.count - at);
            if (count != 0) piece(blocks_[index], first, count, at);
            at += count;
        }
    }

    // The name of the first layer with a delta in the flat range that is NaN or infinite, or "".
    std::string first_not_finite(Shard range) const;
    // The number of weights whose variance the last step has corrected, by layer.
    std::vector<int32_t> negative_variances() const;

    // Copies means and variances to `gaussians`, [means | variances], 2 * size() floats, or back.
    void read_posterior(float* gaussians) const;
    void write_posterior(const float* gaussians) const;

    // Adds the deltas to `sums` ([means | variances], 2 * size() floats), or `sums` to the deltas,
    // for the layers whose flag in `layers` is set.
    void add_deltas_to(float* sums, const std::vector<bool>& layers) const;
    void add_to_deltas(const float* sums, const std::vector<bool>& layers) const;

 private:
    bool replace(size_t index, Block block);

    std::vector<std::string> names_;
    std::vector<EngineLayer> engine_layers_;
    std::vector<Block> blocks_;  // weights and biases of each layer
    std::vector<size_t> offsets_;
    size_t size_ = 0;
    uint64_t version_ = 0;
    float* bucket_ = nullptr;  // null if the deltas are in the layers
};

}  // namespace tagi_ddp
