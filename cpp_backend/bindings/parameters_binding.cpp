#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/update_binding.h"
#include "update/adaptive_sum.h"
#include "update/apply.h"
#include "update/merge.h"
#include "update/statistics.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

namespace tagi_ddp {
namespace {

void require_floats(const char* name, const Floats& array, size_t expected) {
    if (array.size() == expected) return;
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.size()) +
                                " floats, expected " + std::to_string(expected));
}

Block as_block(const std::vector<Floats>& arrays) {
    if (arrays.size() != 4) {
        throw std::invalid_argument("expected mu, var, delta_mu and delta_var");
    }
    for (const Floats& array : arrays) require_floats("an array", array, arrays[0].size());
    return {arrays[0].data(), arrays[1].data(), arrays[2].data(),
            arrays[3].data(), arrays[0].size(), nullptr};
}

Shard checked_range(const Parameters& parameters, size_t begin, size_t end) {
    if (begin > end || end > parameters.size()) {
        throw std::invalid_argument("the range is from " + std::to_string(begin) + " to " +
                                    std::to_string(end) + ", expected one within 0 and " +
                                    std::to_string(parameters.size()));
    }
    return {begin, end - begin};
}

// The range from `begin` whose [means | variances] `gaussians` has.
Shard range_of(const Parameters& parameters, const Floats& gaussians, size_t begin) {
    const size_t count = gaussians.size() / 2;
    require_floats("the array", gaussians, 2 * count);
    return checked_range(parameters, begin, begin + count);
}

}  // namespace

float* checked(const Parameters& parameters, const Floats& bucket) {
    require_floats("bucket", bucket, 2 * parameters.size());
    return bucket.data();
}

void bind_parameters(nb::module_& module) {
    nb::class_<Parameters>(
        module, "Parameters",
        "The parameters of a replica as one flat sequence, in its layers' memory.")
        .def(nb::init<>())
        .def(
            "add_engine_layer",
            [](Parameters& self, const std::string& name, uintptr_t vectors, uintptr_t counter,
               bool has_biases, int64_t rows) {
                self.add_engine_layer(name,
                                      {reinterpret_cast<EngineVectors*>(vectors),
                                       reinterpret_cast<int32_t*>(counter), has_biases, rows});
            },
            "name"_a, "vectors"_a, "counter"_a, "has_biases"_a, "rows"_a = 1,
            "Add a layer by the verified addresses of its vectors and of its counter of corrected "
            "variances. ``rows`` of a sample count for its cap factor.")
        .def(
            "add_layer",
            [](Parameters& self, const std::string& name, const std::vector<Floats>& weights,
               const std::vector<Floats>& biases, nb::ndarray<int32_t, nb::shape<1>> counter,
               int64_t rows) {
                Block block = as_block(weights), other = as_block(biases);
                block.neg_var_counter = counter.data();
                block.rows = other.rows = rows;
                self.add_layer(name, block, other);
            },
            "name"_a, "weights"_a, "biases"_a, "counter"_a, "rows"_a = 1,
            "Add a layer in arrays that the caller keeps: (mu, var, delta_mu, delta_var) of the "
            "weights and of the biases, float32, and an int32 array that counts the corrected "
            "variances.")
        .def("refresh", &Parameters::refresh,
             "Read the addresses of the layers' memory again; call before each use.")
        .def_prop_ro("version", &Parameters::version,
                     "A number that changes if refresh finds that the layers' memory has moved.")
        .def(
            "place_deltas",
            [](Parameters& self, const Floats& bucket) {
                self.place_deltas(checked(self, bucket));
            },
            "bucket"_a, nb::keep_alive<1, 2>(),
            "Move the deltas from the layers to ``bucket``, [means | variances].")
        .def_prop_ro(
            "blocks",
            [](const Parameters& self) {
                nb::list result;
                for (size_t i = 0; i < self.blocks().size(); ++i)
                    result.append(nb::make_tuple(self.offsets()[i], self.blocks()[i].count));
                return result;
            },
            "(offset, count) of each layer's weights and biases in the flat sequence.")
        .def(
            "cap_factors",
            [](const Parameters& self, int64_t batch) {
                std::vector<float> factors;
                for (size_t i = 0; i < self.blocks().size(); i += 2)
                    factors.push_back(self.cap_factor(batch, self.blocks()[i].rows));
                return factors;
            },
            "batch"_a, "Return each layer's cap factor for a step of ``batch`` samples.")
        .def(
            "cap_factor",
            [](const Parameters& self, int64_t batch) { return self.cap_factor(batch); }, "batch"_a,
            "Return that of a layer that sees one row of a sample.")
        .def_rw("chosen_cap_factor", &Parameters::chosen_cap_factor, nb::arg().none(),
                "A cap factor for all batches and layers; None: the engine's.")
        .def_prop_ro("size", &Parameters::size)
        .def(
            "first_not_finite",
            [](const Parameters& self, size_t begin, std::optional<size_t> end) {
                const Shard range = checked_range(self, begin, end.value_or(self.size()));
                return self.first_not_finite(range);
            },
            "begin"_a = 0, "end"_a = nb::none(), Unlocked(),
            "Return the name of the first layer with a delta in the flat range that is NaN or "
            "infinite, or \"\".")
        .def_prop_ro("negative_variances", &Parameters::negative_variances,
                     "The number of weights of each layer whose variance the last step corrected.")
        .def(
            "add_deltas_to",
            [](const Parameters& self, const Floats& sums, const std::vector<bool>& layers) {
                self.add_deltas_to(checked(self, sums), layers);
            },
            "sums"_a, "layers"_a, Unlocked())
        .def(
            "add_to_deltas",
            [](const Parameters& self, const Floats& sums, const std::vector<bool>& layers) {
                self.add_to_deltas(checked(self, sums), layers);
            },
            "sums"_a, "layers"_a, Unlocked())
        .def(
            "pack",
            [](const Parameters& self, const Floats& bucket) {
                pack(self, {0, self.size()}, checked(self, bucket), self.size());
            },
            "bucket"_a, Unlocked(), "Write the deltas to ``bucket``, [means | variances].")
        .def(
            "apply",
            [](const Parameters& self, const Floats& bucket, float divisor, int64_t batch) {
                apply(self, checked(self, bucket), divisor, batch);
            },
            "bucket"_a, "divisor"_a, "batch"_a, Unlocked(),
            "Cap and apply the bucket's deltas, divided by ``divisor``, as those of ``batch`` "
            "samples.")
        .def(
            "pack_shard",
            [](const Parameters& self, const Floats& bucket, size_t begin) {
                const Shard range = range_of(self, bucket, begin);
                pack(self, range, bucket.data(), range.count);
            },
            "bucket"_a, "begin"_a, Unlocked(),
            "Write the deltas of the flat range from ``begin`` to ``bucket``, [means | variances].")
        .def(
            "apply_shard",
            [](const Parameters& self, const Floats& gaussians, size_t begin, float divisor,
               int64_t batch) {
                const Shard range = range_of(self, gaussians, begin);
                apply_shard(self, range, gaussians.data(), divisor, batch);
            },
            "gaussians"_a, "begin"_a, "divisor"_a, "batch"_a, Unlocked(),
            "Cap and apply the deltas of the flat range from ``begin``, and replace them by the "
            "posterior, for take_shard.")
        .def(
            "take_shard",
            [](const Parameters& self, const Floats& gaussians, size_t begin) {
                const Shard range = range_of(self, gaussians, begin);
                take_range(self, range, gaussians.data(), range.count);
            },
            "gaussians"_a, "begin"_a, Unlocked(),
            "Replace the flat range from ``begin`` by another rank's posterior.")
        .def(
            "apply_own", &apply_own, "batch"_a, "times"_a = 1.0f, Unlocked(),
            "Cap and apply the deltas in the layers, of ``batch`` samples; cap factors are "
            "multiplied by ``times``. If a delta is NaN or infinite, apply nothing, and return the "
            "name of its layer; else return \"\".")
        .def(
            "read_posterior",
            [](const Parameters& self, const Floats& gaussians) {
                self.read_posterior(checked(self, gaussians));
            },
            "gaussians"_a, Unlocked(), "Copy means and variances to ``gaussians``.")
        .def(
            "write_posterior",
            [](const Parameters& self, const Floats& gaussians) {
                self.write_posterior(checked(self, gaussians));
            },
            "gaussians"_a, Unlocked(), "Replace means and variances by ``gaussians``.")
        .def(
            "change_since",
            [](const Parameters& self, const Floats& now, const Floats& before,
               const Floats& change) {
                change_since(checked(self, now), checked(self, before), checked(self, change),
                             self.size());
            },
            "now"_a, "before"_a, "change"_a, Unlocked(),
            "Write the change between Gaussians to ``change``: [precisions | weighted means].")
        .def(
            "add_change",
            [](const Parameters& self, const Floats& gaussians, const Floats& reference,
               const Floats& change, const std::optional<Floats>& own) {
                return add_change(self, checked(self, gaussians), checked(self, reference),
                                  checked(self, change), own ? checked(self, *own) : nullptr);
            },
            "gaussians"_a, "reference"_a, "change"_a, "own"_a = nb::none(), Unlocked(),
            "Multiply ``gaussians`` by ``change`` minus ``own``, both relative to the means of "
            "``reference``. Returns the number of parameters of each layer that took only a part.");

    nb::class_<AdaptiveSum>(module, "AdaptiveSum",
                            "Sums of changes, damped where ranks agree; see adaptive_sum.h.")
        .def(nb::init<const Parameters&>(), "parameters"_a)
        .def_ro_static("BLOCK", &AdaptiveSum::block_floats)
        .def_prop_ro("described", &AdaptiveSum::described,
                     "The number of floats that describe a change.")
        .def(
            "describe",
            [](const AdaptiveSum& self, const Floats& change, const Floats& before, double steps,
               const Floats& description) {
                self.check(change.size(), before.size(), description.size());
                self.describe(change.data(), before.data(), steps, description.data());
            },
            "change"_a, "before"_a, "steps"_a, "description"_a, Unlocked(),
            "Describe a rank's change in ``steps`` steps since ``before``: the square of its "
            "weighted half in each block, then the steps.")
        .def(
            "damp",
            [](AdaptiveSum& self, const Floats& change, const Floats& before,
               const Floats& description, int ranks) {
                if (ranks < 1) throw std::invalid_argument("ranks must be at least 1");
                self.check(change.size(), before.size(), description.size());
                return self.damp(change.data(), before.data(), description.data(), ranks);
            },
            "change"_a, "before"_a, "description"_a, "ranks"_a, Unlocked(),
            "Damp the sum of ``ranks`` changes; ``description`` is the sum of their descriptions. "
            "Returns by layer how far the ranks agree: 0 if their changes are orthogonal, 1 if "
            "they are equal.")
        .def("restart", &AdaptiveSum::restart, "Forget the previous sums.")
        .def_prop_ro(
            "previous",
            [](AdaptiveSum& self) {
                return nb::ndarray<nb::numpy, float, nb::ndim<1>>(self.previous().data(),
                                                                  {self.previous().size()});
            },
            nb::rv_policy::reference_internal,
            "A writable view of the weighted half of the previous sum.")
        .def_prop_ro(
            "trust",
            [](AdaptiveSum& self) {
                return nb::ndarray<nb::numpy, double, nb::ndim<1>>(self.trust().data(),
                                                                   {self.trust().size()});
            },
            nb::rv_policy::reference_internal, "A writable view of the trust in each block.");

    nb::class_<RunningStatistics>(module, "RunningStatistics",
                                  "The running statistics of all batch normalization layers.")
        .def(nb::init<>())
        .def(
            "add_engine_layer",
            [](RunningStatistics& self, uintptr_t address) {
                self.add(reinterpret_cast<EngineBatchNorm*>(address));
            },
            "address"_a)
        .def_prop_ro("size", &RunningStatistics::size)
        .def(
            "pack",
            [](const RunningStatistics& self, const Floats& out, float weight) {
                require_floats("out", out, self.size());
                self.pack(out.data(), weight);
            },
            "out"_a, "weight"_a)
        .def(
            "unpack",
            [](const RunningStatistics& self, const Floats& values, float total) {
                require_floats("values", values, self.size());
                self.unpack(values.data(), total);
            },
            "values"_a, "total"_a);
}

}  // namespace tagi_ddp
