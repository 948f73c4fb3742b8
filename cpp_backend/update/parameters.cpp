#include "update/parameters.h"

#include <cstring>
#include <limits>
#include <stdexcept>

#include "common/simd.h"
#include "update/agreement.h"

namespace tagi_ddp {
namespace {

Block weights_of(const EngineLayer& layer) {
    EngineVectors& v = *layer.vectors;
    return {v.mu_w.data(), v.var_w.data(),        v.delta_mu_w.data(), v.delta_var_w.data(),
            v.mu_w.size(), layer.neg_var_counter, layer.rows};
}

Block biases_of(const EngineLayer& layer) {
    EngineVectors& v = *layer.vectors;
    const size_t count = layer.has_biases ? v.mu_b.size() : 0;
    return {v.mu_b.data(), v.var_b.data(), v.delta_mu_b.data(), v.delta_var_b.data(),
            count,         nullptr,        layer.rows};
}

bool sizes_agree(const EngineLayer& layer) {
    const EngineVectors& v = *layer.vectors;
    const size_t w = v.mu_w.size();
    const size_t b = layer.has_biases ? v.mu_b.size() : 0;
    return v.var_w.size() == w && v.delta_mu_w.size() == w && v.delta_var_w.size() == w &&
           (b == 0 ||
            (v.var_b.size() == b && v.delta_mu_b.size() == b && v.delta_var_b.size() == b));
}

// If 1 is added to the exponent, it overflows into the sign bit only for infinities and NaNs.
TAGI_DDP_WIDE
bool all_finite(const float* values, size_t count) {
    uint32_t carry = 0;
    for (size_t i = 0; i < count; ++i) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        carry |= (bits & 0x7fffffffu) + 0x00800000u;
    }
    return (carry & 0x80000000u) == 0;
}

void add(const float* values, size_t count, float* sums) {
    for (size_t i = 0; i < count; ++i) sums[i] += values[i];
}

}  // namespace

void Parameters::add_engine_layer(const std::string& name, const EngineLayer& layer) {
    if (!sizes_agree(layer)) {
        throw std::runtime_error(name + " has means, variances and deltas of different sizes");
    }
    add_layer(name, weights_of(layer), biases_of(layer));
    engine_layers_.back() = layer;
}

void Parameters::add_layer(const std::string& name, const Block& weights, const Block& biases) {
    names_.push_back(name);
    engine_layers_.emplace_back();
    for (const Block& block : {weights, biases}) {
        blocks_.push_back(block);
        offsets_.push_back(size_);
        size_ += block.count;
    }
}

void Parameters::refresh() {
    bool moved = false;
    for (size_t i = 0; i < names_.size(); ++i) {
        const EngineLayer& layer = engine_layers_[i];
        if (layer.vectors == nullptr) continue;
        const Block weights = weights_of(layer);
        const Block biases = biases_of(layer);
        if (!sizes_agree(layer) || weights.count != blocks_[2 * i].count ||
            biases.count != blocks_[2 * i + 1].count) {
            throw std::runtime_error(names_[i] +
                                     " has another number of parameters than when the model was "
                                     "wrapped. Wrap the model after changing it.");
        }
        moved |= replace(2 * i, weights);
        moved |= replace(2 * i + 1, biases);
    }
    version_ += moved;
}

bool Parameters::replace(size_t index, Block block) {
    if (bucket_ != nullptr) {
        block.delta_mu = bucket_ + offsets_[index];
        block.delta_var = block.delta_mu + size_;
    }
    const bool moved = block.mu != blocks_[index].mu || block.var != blocks_[index].var;
    blocks_[index] = block;
    return moved;
}

void Parameters::place_deltas(float* bucket) {
    bucket_ = bucket;
    for (size_t i = 0; i < blocks_.size(); ++i) replace(i, blocks_[i]);
}

float Parameters::cap_factor(int64_t batch, int64_t rows) const {
    if (chosen_cap_factor) {  // 0 / 0 has no value, and a variance may be 0.
        return std::max(*chosen_cap_factor, std::numeric_limits<float>::min());
    }
    return rows == 0 ? 1.0f : tagi_ddp::cap_factor(batch * rows);
}

std::string Parameters::first_not_finite(Shard range) const {
    std::string name;
    visit(range, [&](const Block& block, size_t first, size_t count, size_t) {
        if (name.empty() && !(all_finite(block.delta_mu + first, count) &&
                              all_finite(block.delta_var + first, count))) {
            name = names_[static_cast<size_t>(&block - blocks_.data()) / 2];
        }
    });
    return name;
}

std::vector<int32_t> Parameters::negative_variances() const {
    std::vector<int32_t> result;
    for (size_t i = 0; i < names_.size(); ++i) {
        const int32_t* counter = blocks_[2 * i].neg_var_counter;
        result.push_back(counter == nullptr ? 0 : *counter);
    }
    return result;
}

void Parameters::read_posterior(float* gaussians) const {
    for (size_t i = 0; i < blocks_.size(); ++i) {
        std::copy_n(blocks_[i].mu, blocks_[i].count, gaussians + offsets_[i]);
        std::copy_n(blocks_[i].var, blocks_[i].count, gaussians + size_ + offsets_[i]);
    }
}

void Parameters::write_posterior(const float* gaussians) const {
    for (size_t i = 0; i < blocks_.size(); ++i) {
        std::copy_n(gaussians + offsets_[i], blocks_[i].count, blocks_[i].mu);
        std::copy_n(gaussians + size_ + offsets_[i], blocks_[i].count, blocks_[i].var);
    }
}

void Parameters::add_deltas_to(float* sums, const std::vector<bool>& layers) const {
    for (size_t i = 0; i < blocks_.size(); ++i) {
        if (!layers[i / 2]) continue;
        add(blocks_[i].delta_mu, blocks_[i].count, sums + offsets_[i]);
        add(blocks_[i].delta_var, blocks_[i].count, sums + size_ + offsets_[i]);
    }
}

void Parameters::add_to_deltas(const float* sums, const std::vector<bool>& layers) const {
    for (size_t i = 0; i < blocks_.size(); ++i) {
        if (!layers[i / 2]) continue;
        add(sums + offsets_[i], blocks_[i].count, blocks_[i].delta_mu);
        add(sums + size_ + offsets_[i], blocks_[i].count, blocks_[i].delta_var);
    }
}

}  // namespace tagi_ddp
