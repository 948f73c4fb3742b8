#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "engine/layer_layout.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

template <typename Object>
Object* object_at(uintptr_t address) {
    return reinterpret_cast<Object*>(address);
}

std::vector<float>& vector_of(EngineLayer& layer, const std::string& name) {
    using Field = std::vector<float> EngineLayer::*;
    constexpr std::pair<const char*, Field> fields[] = {
        {"mu_w", &EngineLayer::mu_w},
        {"var_w", &EngineLayer::var_w},
        {"mu_b", &EngineLayer::mu_b},
        {"var_b", &EngineLayer::var_b},
        {"delta_mu_w", &EngineLayer::delta_mu_w},
        {"delta_var_w", &EngineLayer::delta_var_w},
        {"delta_mu_b", &EngineLayer::delta_mu_b},
        {"delta_var_b", &EngineLayer::delta_var_b},
    };
    for (const auto& [known, field] : fields) {
        if (name == known) return layer.*field;
    }
    throw std::invalid_argument("name is " + name + ", expected that of a vector of a layer");
}

// A view of the engine's memory, valid until the engine replaces it.
template <typename T>
nb::object view(T* data, size_t size) {
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {size}, nb::handle()),
                    nb::rv_policy::reference);
}

// Returns the vector if there is one: its begin, end and capacity are in order. Another layout of
// the memory may have anything there, of which nothing may be read.
std::vector<float>& checked(std::vector<float>& values) {
    uintptr_t words[3];
    static_assert(sizeof words == sizeof values);
    std::memcpy(words, &values, sizeof words);
    const auto [begin, end, capacity] = words;
    const bool in_order = begin <= end && end <= capacity && (begin == 0) == (capacity == 0);
    if (!in_order || begin % alignof(float) != 0 || (end - begin) % sizeof(float) != 0)
        throw std::invalid_argument("there is no vector where one should be");
    return values;
}

nb::object view(std::vector<float>& values) { return view(checked(values).data(), values.size()); }

}  // namespace

void bind_engine(nb::module_& module) {
    nb::class_<EngineLayer>(module, "EngineLayer", "The memory of one engine layer at its address.")
        .def_ro("input_size", &EngineLayer::input_size)
        .def_ro("output_size", &EngineLayer::output_size)
        .def_ro("num_weights", &EngineLayer::num_weights)
        .def_ro("num_biases", &EngineLayer::num_biases)
        .def_ro("in_width", &EngineLayer::in_width)
        .def_ro("in_height", &EngineLayer::in_height)
        .def_ro("in_channels", &EngineLayer::in_channels)
        .def_ro("out_width", &EngineLayer::out_width)
        .def_ro("out_height", &EngineLayer::out_height)
        .def_ro("out_channels", &EngineLayer::out_channels)
        .def_ro("bias", &EngineLayer::bias)
        .def_ro("num_threads", &EngineLayer::num_threads)
        .def_ro("training", &EngineLayer::training)
        .def_prop_ro(
            "neg_var_w_counter", [](EngineLayer& l) { return view(&l.neg_var_w_counter, 1); },
            "A view of the counter of corrected variances, int32.")
        .def(
            "vector",
            [](EngineLayer& l, const std::string& name) { return view(vector_of(l, name)); },
            "name"_a,
            "A view of mu_w, var_w, mu_b, var_b or their delta_..., float32. Raises ValueError if "
            "there is no vector.")
        .def(
            "size",
            [](EngineLayer& l, const std::string& name) {
                return checked(vector_of(l, name)).size();
            },
            "name"_a, "The size of such a vector, of which no element is read.");
    module.def("engine_layer", &object_at<EngineLayer>, "address"_a, nb::rv_policy::reference,
               "The layer at a verified address.");

    module.def(
        "batch_norm_statistics",
        [](uintptr_t address) {
            auto* norm = object_at<EngineBatchNorm>(address);
            // If the flag is set, the next batch replaces the statistics.
            auto* flag = reinterpret_cast<uint8_t*>(&norm->first_batch);
            return nb::make_tuple(view(norm->mu_ra), view(norm->var_ra), norm->epsilon,
                                  norm->momentum, view(flag, 1));
        },
        "address"_a,
        "A batch normalization layer: views of its running means and variances, epsilon, momentum, "
        "and a view of its flag for the first batch.");
    module.def(
        "smoothing_lstm",
        [](uintptr_t address) {
            auto* layer = object_at<EngineSLSTM>(address);
            auto& series = layer->smooth_states;
            nb::list written;
            for (auto* parts : {series.priors, series.posteriors}) {
                for (size_t p = 0; p < 4; ++p) written.append(view(parts[p]));
            }
            for (auto& covariance : series.covariances) written.append(view(covariance));
            return nb::make_tuple(view(&layer->time_step, 1), series.num_timesteps, written);
        },
        "address"_a,
        "A smoothing LSTM layer: a view of the number of the series' next step, the series' "
        "length, "
        "and views of all arrays that forward and backward write, with a row for each step.");
    module.def(
        "smoothing_linear",
        [](uintptr_t address) {
            auto* layer = object_at<EngineSLinear>(address);
            return nb::make_tuple(view(&layer->time_step, 1), layer->smooth_states.num_timesteps);
        },
        "address"_a,
        "A smoothing linear layer: a view of the number of the series' next step, and the series' "
        "length.");
    module.def(
        "hidden_states",
        [](uintptr_t address) {
            auto* states = object_at<EngineHiddenStates>(address);
            return nb::make_tuple(view(states->mu_a), view(states->var_a), view(states->jcb));
        },
        "address"_a, "Views of the means, variances and jacobians of hidden states.");
    module.def(
        "delta_states",
        [](uintptr_t address) {
            auto* states = object_at<EngineDeltaStates>(address);
            return nb::make_tuple(view(states->delta_mu), view(states->delta_var));
        },
        "address"_a, "Views of the means and variances of delta states.");
}

}  // namespace tagi_ddp
