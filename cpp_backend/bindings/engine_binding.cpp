#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "engine/engine_memory.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

template <typename Object>
Object* object_at(uintptr_t address) {
    return reinterpret_cast<Object*>(address);
}

std::vector<float>& vector_of(EngineVectors& vectors, const std::string& name) {
    using Field = std::vector<float> EngineVectors::*;
    constexpr std::pair<const char*, Field> fields[] = {
        {"mu_w", &EngineVectors::mu_w},
        {"var_w", &EngineVectors::var_w},
        {"mu_b", &EngineVectors::mu_b},
        {"var_b", &EngineVectors::var_b},
        {"delta_mu_w", &EngineVectors::delta_mu_w},
        {"delta_var_w", &EngineVectors::delta_var_w},
        {"delta_mu_b", &EngineVectors::delta_mu_b},
        {"delta_var_b", &EngineVectors::delta_var_b},
    };
    for (const auto& [known, field] : fields) {
        if (name == known) return vectors.*field;
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
    nb::class_<EngineVectors>(module, "EngineVectors",
                              "The parameters and deltas of one engine layer.")
        .def(
            "view",
            [](EngineVectors& v, const std::string& name) { return view(vector_of(v, name)); },
            "name"_a,
            "A view of mu_w, var_w, mu_b, var_b or their delta_..., float32. Raises ValueError if "
            "there is no vector.")
        .def(
            "size",
            [](EngineVectors& v, const std::string& name) {
                return checked(vector_of(v, name)).size();
            },
            "name"_a, "The size of such a vector, of which no element is read.");
    module.def("engine_vectors", &object_at<EngineVectors>, "address"_a, nb::rv_policy::reference,
               "The vectors of a layer at their verified address.");

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
        "The fields of a batch normalization layer: views of its running means and variances, "
        "epsilon, momentum, "
        "and a view of its flag for the first batch.");
    module.def(
        "lstm_series",
        [](uintptr_t address) {
            auto* series = object_at<EngineLSTMSeries>(address);
            nb::list written;
            for (auto* parts : {series->priors, series->posteriors}) {
                for (size_t p = 0; p < 4; ++p) written.append(view(parts[p]));
            }
            for (auto& covariance : series->covariances) written.append(view(covariance));
            return nb::make_tuple(view(&series->time_step, 1), series->num_timesteps, written);
        },
        "address"_a,
        "The series of a smoothing LSTM layer: a view of the number of its next step, its length, "
        "and views of all arrays that forward and backward write, with a row for each step.");
    module.def(
        "linear_series",
        [](uintptr_t address) {
            auto* series = object_at<EngineLinearSeries>(address);
            return nb::make_tuple(view(&series->time_step, 1), series->num_timesteps);
        },
        "address"_a,
        "The series of a smoothing linear layer: a view of the number of its next step, and its "
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
