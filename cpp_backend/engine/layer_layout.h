// The memory layout of the engine's objects (pytagi 0.2.1 and its source of January 2026, x86-64).
//
// It is an assumption about another project's binary: tagi_ddp.engine verifies it before any use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace tagi_ddp {

// The engine constructs and destroys these objects; here they are only accessed in place.
struct EngineObject {
    EngineObject() = delete;
    ~EngineObject() = delete;
};

struct EngineLayer : EngineObject {
    void* virtual_table;
    size_t input_size, output_size;
    size_t num_weights, num_biases;
    size_t in_width, in_height, in_channels;
    size_t out_width, out_height, out_channels;
    bool bias, param_update;
    float cap_factor_update;
    int32_t neg_var_w_counter;
    int32_t device_idx;
    std::vector<float> mu_w, var_w, mu_b, var_b;
    std::vector<float> delta_mu_w, delta_var_w, delta_mu_b, delta_var_b;
    void* bwd_states;
    uint32_t num_threads;
    bool training;
    std::string device;
};

static_assert(sizeof(std::vector<float>) == 24 && sizeof(std::string) == 32,
              "the engine is built against libstdc++");
static_assert(std::is_standard_layout_v<EngineLayer>);
static_assert(offsetof(EngineLayer, bias) == 88 && offsetof(EngineLayer, cap_factor_update) == 92 &&
              offsetof(EngineLayer, mu_w) == 104 && offsetof(EngineLayer, num_threads) == 304 &&
              offsetof(EngineLayer, device) == 312 && sizeof(EngineLayer) == 344);

// The engine's batch normalization on CPU: its running statistics follow the fields of the base.
struct EngineBatchNorm : EngineObject {
    std::byte base[sizeof(EngineLayer)];
    int32_t num_features;
    std::vector<float> mu_ra, var_ra, mu_norm_batch, var_norm_batch;
    float epsilon, momentum, gain_w, gain_b;
    bool first_batch;
};

static_assert(offsetof(EngineBatchNorm, mu_ra) == 352 && offsetof(EngineBatchNorm, epsilon) == 448);

// The engine's smoothing LSTM layer on CPU: the fields of the LSTM, then the series.
struct EngineSLSTM : EngineObject {
    std::byte base[sizeof(EngineLayer)];
    int32_t seq_len, batch_size;
    float act_omega, gain_w, gain_b;
    std::string init_method;
    int32_t positions[8];
    struct {
        void* virtual_table;
        size_t num_states, num_inputs;
        int32_t device_idx;
        std::vector<float> gates[21], previous[4], prior[4];
    } lstm_states;
    struct {
        void* virtual_table;
        size_t num_states, num_timesteps;
        std::vector<float> priors[4], posteriors[4], smoothed[4], covariances[2];
    } smooth_states;
    int32_t time_step;
};

static_assert(offsetof(EngineSLSTM, lstm_states) == 432 &&
              offsetof(EngineSLSTM, smooth_states) == 1160 &&
              offsetof(EngineSLSTM, time_step) == 1520);

struct EngineSLinear : EngineObject {
    std::byte base[sizeof(EngineLayer)];
    float gain_w, gain_b;
    std::string init_method;
    struct {
        void* virtual_table;
        size_t num_timesteps;
        std::vector<float> outputs[6];
    } smooth_states;
    int32_t time_step;
};

static_assert(offsetof(EngineSLinear, time_step) == 544);

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
