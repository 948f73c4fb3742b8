#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/update_binding.h"
#include "bindings/view.h"
#include "compute/innovation.h"
#include "compute/network.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

using Inputs = View<const float>;
using Numbers = View<const int32_t>;
using Outputs = View<float>;

// Returns true if all values are finite and not negative. The variance of a mean that is NaN may
// have any value; `means` may be null.
bool are_variances(const float* values, const float* means, size_t count) {
    constexpr float largest = std::numeric_limits<float>::max();
    size_t valid = 0;  // a sum, so the loop vectorizes
    for (size_t i = 0; i < count; ++i) valid += values[i] >= 0.0f && values[i] <= largest;
    if (valid == count) return true;
    if (means == nullptr) return false;
    for (size_t i = 0; i < count; ++i) {
        if (!(values[i] >= 0.0f && values[i] <= largest) && !std::isnan(means[i])) return false;
    }
    return true;
}

size_t batch_of(const Network& network, const Inputs& mean, const Inputs& variance) {
    const size_t width = network.input_size();
    if (mean.size() == 0 || mean.size() % width != 0) {
        throw std::invalid_argument("mu_x has " + std::to_string(mean.size()) +
                                    " elements, no multiple of the network's input size, " +
                                    std::to_string(width));
    }
    if (variance) require_size("var_x", variance.size(), mean.size());
    return mean.size() / width;
}

Observations observations_of(const Inputs& mean, const Inputs& variance, const Numbers& selected) {
    if (variance) require_size("var_obs", variance.size(), mean.size());
    if (selected) {
        if (!variance) throw std::invalid_argument("selected_idx needs var_obs");
        require_size("selected_idx", selected.size(), mean.size());
    }
    return {mean.data(), variance.data(), selected.data(), mean.size()};
}

// Throws unless rows and variances are valid. The caller then makes the error for its user.
void require_valid(const Inputs& mean, const Inputs& variance, const Inputs& mu_obs,
                   const Inputs& var_obs, size_t batch) {
    const bool rows = mu_obs.dimensions() < 2 || mu_obs.extent(0) == batch;
    const bool same_rows =
        !variance || variance.dimensions() <= 1 ||
        (variance.dimensions() == mean.dimensions() && variance.extent(0) == mean.extent(0));
    if (!rows || !same_rows) throw std::invalid_argument("an array has other rows than mu_x");
    if ((variance && !are_variances(variance.data(), nullptr, variance.size())) ||
        (var_obs && !are_variances(var_obs.data(), mu_obs.data(), var_obs.size()))) {
        throw std::invalid_argument("a variance is negative, infinite or NaN");
    }
}

// Releases the interpreter lock, unless the work takes no longer than that.
class UnlockedIfLong {
 public:
    UnlockedIfLong(const Network& network, size_t samples) {
        if (network.parameters().size() * samples >= long_work) released_.emplace();
    }

 private:
    static constexpr size_t long_work = 1 << 14;  // weights times samples, about 10 microseconds
    std::optional<nb::gil_scoped_release> released_;
};

// Undoes the changes of a step to lasting state, unless it is released.
class Rollback {
 public:
    explicit Rollback(Network& network) : network_(&network) { network.keep(); }
    ~Rollback() {
        if (network_ != nullptr) network_->restore();
    }
    Rollback(const Rollback&) = delete;
    Rollback& operator=(const Rollback&) = delete;
    void release() { network_ = nullptr; }

 private:
    Network* network_;
};

void read_outputs(const Network& network, const Outputs& mean, const Outputs& variance) {
    const size_t count = network.output_count();
    require_size("out_mean", mean.size(), count);
    require_size("out_variance", variance.size(), count);
    network.read_outputs(mean.data(), variance.data());
}

// Returns a function that calls a method of Network with the engine's object at a verified address.
template <typename Object, typename Method>
auto with_object(Method method) {
    return [method](Network& self, uintptr_t address) {
        (self.*method)(*reinterpret_cast<Object*>(address));
    };
}

}  // namespace

void bind_compute(nb::module_& module) {
    module.def(
        "update_states",
        [](uintptr_t states_address, const Inputs& mu_obs, const Inputs& var_obs,
           uintptr_t deltas_address) {
            const auto& states = *reinterpret_cast<const EngineHiddenStates*>(states_address);
            auto& deltas = *reinterpret_cast<EngineDeltaStates*>(deltas_address);
            const size_t count = mu_obs.size();
            const auto fits = [&](const std::vector<float>& values) {
                return values.size() == count;
            };
            if (var_obs.size() != count || !fits(states.mu_a) || !fits(states.var_a) ||
                !fits(states.jcb) || !fits(deltas.delta_mu) || !fits(deltas.delta_var) ||
                !are_variances(var_obs.data(), mu_obs.data(), count)) {
                return false;
            }
            const States outputs{
                states.mu_a.data(), states.var_a.data(), states.jcb.data(), 1, count, count};
            innovation(outputs, mu_obs.data(), var_obs.data(),
                       {deltas.delta_mu.data(), deltas.delta_var.data()});
            return true;
        },
        "states"_a, "mu_obs"_a, "var_obs"_a, "deltas"_a,
        "Write the innovation of verified hidden states to verified delta states, from "
        "observations of all outputs. Returns False, and writes nothing, unless all sizes are "
        "equal, and variances are finite and not negative.");
    module.def(
        "are_variances",
        [](const Inputs& values) { return are_variances(values.data(), nullptr, values.size()); },
        "values"_a, "Return True if all values are finite and not negative.");
    nb::class_<Network>(module, "Network",
                        "A small network's forward, output update and backward over a replica's "
                        "parameters, in the caller's thread.")
        .def(nb::init<Parameters&, size_t>(), "parameters"_a, "input_rows"_a = 1,
             nb::keep_alive<1, 2>())
        .def("add_linear", &Network::add_linear, "index"_a, "outputs"_a, "inputs"_a, "smoothing"_a)
        .def(
            "add_lstm",
            [](Network& self, size_t index, size_t outputs, size_t inputs, size_t steps,
               bool smoothing, bool recurrent, bool last_step) {
                const Recurrence recurrence = !recurrent  ? Recurrence::none
                                              : last_step ? Recurrence::last_step
                                                          : Recurrence::all_steps;
                self.add_lstm(index, outputs, inputs, steps, smoothing, recurrence);
            },
            "index"_a, "outputs"_a, "inputs"_a, "steps"_a, "smoothing"_a, "recurrent"_a,
            "last_step"_a)
        .def("add_layer_norm", &Network::add_layer_norm, "index"_a, "inputs"_a, "epsilon"_a)
        .def("add_rms_norm", &Network::add_rms_norm, "index"_a, "inputs"_a, "epsilon"_a)
        .def("add_embedding", &Network::add_embedding, "index"_a, "size"_a, "inputs"_a, "padding"_a,
             "sums"_a, "rows"_a)
        .def("add_activation", &Network::add_activation, "kind"_a)
        .def_prop_ro("input_size", &Network::input_size)
        .def_prop_ro("output_size", &Network::output_size)
        .def("set_samples", &Network::set_samples, "samples"_a,
             "Set the number of steps of a series for smoothing layers.")
        .def(
            "forward",
            [](Network& self, const Inputs& mean, const Inputs& variance, const Inputs& jacobian,
               bool training, const Outputs& out_mean, const Outputs& out_variance) {
                const size_t batch = batch_of(self, mean, variance);
                const UnlockedIfLong unlocked(self, batch);
                self.forward(mean.data(), variance.data(), jacobian.data(), batch, training);
                read_outputs(self, out_mean, out_variance);
            },
            "mean"_a, "variance"_a.none(), "jacobian"_a.none(), "training"_a, "out_mean"_a,
            "out_variance"_a,
            "Compute the outputs of flat inputs, which are exact without a variance. "
            "``jacobian`` is that of the activation that computed them, or None.")
        .def(
            "update",
            [](Network& self, const Inputs& mean, const Inputs& variance, const Numbers& selected) {
                self.update(observations_of(mean, variance, selected));
            },
            "mu_obs"_a, "var_obs"_a.none(), "selected_idx"_a.none(),
            "Compute the outputs' innovation from observations of all outputs, of selected ones, "
            "or, without ``var_obs``, of observations with unknown noise.")
        .def(
            "set_innovation",
            [](Network& self, const Inputs& mean, const Inputs& variance) {
                const size_t count = self.output_count();
                require_size("mean", mean.size(), count);
                require_size("variance", variance.size(), count);
                self.set_innovation(mean.data(), variance.data());
            },
            "mean"_a, "variance"_a, "Set the outputs' innovation, flat.")
        .def(
            "backward",
            [](Network& self, bool to_input) {
                const UnlockedIfLong unlocked(self, self.outputs().batch);
                self.backward(to_input);
            },
            "to_input"_a, "Write the parameters' deltas.")
        .def(
            "learn",
            [](Network& self, const Inputs& mean, const Inputs& variance, const Inputs& mu_obs,
               const Inputs& var_obs, const Numbers& selected, const Outputs& out_mean,
               const Outputs& out_variance, const SharedStep* together) {
                const size_t batch = batch_of(self, mean, variance);
                const Observations observations = observations_of(mu_obs, var_obs, selected);
                require_valid(mean, variance, mu_obs, var_obs, batch);
                Rollback rollback(self);
                std::string culprit;
                std::vector<int> refused_by;
                {
                    const UnlockedIfLong unlocked(self, batch);
                    self.forward(mean.data(), variance.data(), nullptr, batch, true);
                    self.update(observations);
                    self.backward(false);
                    read_outputs(self, out_mean, out_variance);
                    if (together == nullptr) {
                        culprit = apply_own(self.parameters(), static_cast<int64_t>(batch));
                        if (!culprit.empty()) refused_by.push_back(0);
                    }
                }
                if (together != nullptr) {
                    Step step = (*together)(static_cast<int64_t>(batch), false);
                    culprit = std::move(step.culprit);
                    refused_by = std::move(step.agreement.not_finite);
                }
                if (refused_by.empty()) rollback.release();
                return std::make_pair(refused_by, culprit);
            },
            "mean"_a, "variance"_a.none(), "mu_obs"_a, "var_obs"_a.none(), "selected_idx"_a.none(),
            "out_mean"_a, "out_variance"_a, "together"_a.none(),
            "Compute a whole step: forward, update, backward; then cap and apply the deltas, by "
            "``together`` those of all ranks of a host. Returns the ranks with a delta that is NaN "
            "or infinite, and the name of this rank's first layer with one, or \"\". If there are "
            "such ranks, parameters and lasting state stay unchanged.")
        .def("read_outputs", &read_outputs, "out_mean"_a, "out_variance"_a,
             "Copy the means and variances of the outputs, flat.")
        .def(
            "read_input_innovation",
            [](const Network& self, const Outputs& mean, const Outputs& variance) {
                if (!self.has_input_innovation()) {
                    throw std::runtime_error("set input_state_update to True before backward()");
                }
                const size_t count = self.input_count();
                require_size("mean", mean.size(), count);
                require_size("variance", variance.size(), count);
                self.read_input_innovation(mean.data(), variance.data());
            },
            "mean"_a, "variance"_a, "Copy the innovation of the inputs, flat.")
        .def("show_outputs", with_object<EngineHiddenStates>(&Network::show_outputs), "address"_a,
             "Write the outputs to verified hidden states of their size.")
        .def("take_innovation", with_object<EngineDeltaStates>(&Network::take_innovation),
             "address"_a, "Read the outputs' innovation from verified delta states.")
        .def("show_innovation", with_object<EngineDeltaStates>(&Network::show_innovation),
             "address"_a, "Write the outputs' innovation to verified delta states.")
        .def_prop_ro(
            "embedding_sums",
            [](nb::handle self) {
                std::vector<nb::ndarray<nb::numpy, float, nb::ndim<1>>> views;
                for (Embedding* layer : nb::cast<Network&>(self).embeddings()) {
                    std::vector<float>& sums = layer->sums();
                    views.emplace_back(sums.data(), std::initializer_list<size_t>{sums.size()},
                                       self);
                }
                return views;
            },
            "Writable views of the accumulated deltas of each Embedding, [means | variances].")
        .def("keep", &Network::keep,
             "Copy the lasting state that forward and backward change: states of LSTM layers, "
             "series, accumulated deltas.")
        .def("restore", &Network::restore, "Restore the copy of `keep`.")
        .def("reset_lstm_states", &Network::reset_states)
        .def(
            "get_lstm_states",
            [](const Network& self, int64_t step) {
                std::map<size_t, RecurrentStates> states;
                for (const auto& [index, layer] : self.lstms()) {
                    const auto* smoother = dynamic_cast<const SLSTM*>(layer);
                    states[index] = step < 0 || smoother == nullptr
                                        ? layer->get_states()
                                        : smoother->smoothed_states(static_cast<size_t>(step));
                }
                return states;
            },
            "time_step"_a)
        .def(
            "set_lstm_states",
            [](Network& self, const std::map<size_t, RecurrentStates>& states,
               std::optional<size_t> batch) {
                for (const auto& [index, parts] : states) {
                    LSTM& layer = *self.lstms().at(index);
                    if (!batch && layer.batch() == 0) continue;  // the first batch resets them
                    layer.set_states(parts, batch.value_or(layer.batch()));
                }
            },
            "states"_a, "batch"_a = nb::none(),
            "Set the states for a batch of ``batch`` samples; None: as many as in the last batch.")
        .def(
            "smooth",
            [](Network& self) -> std::optional<std::pair<std::vector<float>, std::vector<float>>> {
                const Series* series = self.smooth();
                if (series == nullptr) return std::nullopt;
                return std::make_pair(series->mean, series->variance);
            },
            "Smooth the series so far; return means and variances of the outputs.");
}

}  // namespace tagi_ddp
