// Parts of the engine's objects, which are read and written in place.
//
// They lie at offsets that tagi_ddp.engine finds at run time, and verifies before any use: an
// engine that somebody has built may have others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace tagi_ddp {

// The engine constructs and destroys these objects; here they are only accessed in place.
struct EngineObject {
    EngineObject() = delete;
    ~EngineObject() = delete;
};

// The parameters of a layer, and their deltas.
struct EngineVectors : EngineObject {
    std::vector<float> mu_w, var_w, mu_b, var_b;
    std::vector<float> delta_mu_w, delta_var_w, delta_mu_b, delta_var_b;
};

static_assert(sizeof(std::vector<float>) == 24, "the engine is built against libstdc++");
static_assert(std::is_standard_layout_v<EngineVectors> && sizeof(EngineVectors) == 8 * 24);

// What batch normalization on the CPU adds to its base class.
struct EngineBatchNorm : EngineObject {
    int32_t num_features;
    std::vector<float> mu_ra, var_ra, mu_norm_batch, var_norm_batch;
    float epsilon, momentum, gain_w, gain_b;
    bool first_batch;
};

static_assert(offsetof(EngineBatchNorm, mu_ra) == 8 && offsetof(EngineBatchNorm, epsilon) == 104);

// The series that a smoothing LSTM layer records.
struct EngineLSTMSeries : EngineObject {
    size_t num_timesteps;
    std::vector<float> priors[4], posteriors[4], smoothed[4], covariances[2];
    int32_t time_step;
};

// The series that a smoothing linear layer records.
struct EngineLinearSeries : EngineObject {
    size_t num_timesteps;
    std::vector<float> outputs[6];
    int32_t time_step;
};

// The states that layers pass on. Output updaters read hidden states and write delta states.
struct EngineHiddenStates : EngineObject {
    void* virtual_table;
    std::vector<float> mu_a, var_a, jcb;
};

struct EngineDeltaStates : EngineObject {
    void* virtual_table;
    std::vector<float> delta_mu, delta_var;
};

}  // namespace tagi_ddp
