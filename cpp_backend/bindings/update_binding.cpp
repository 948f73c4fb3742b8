#include "bindings/update_binding.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "update/agreement.h"
#include "update/apply.h"
#include "update/compress.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace tagi_ddp {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_compressed(const Floats& values, int bits, const Bytes& bytes) {
    if (bits != 8 && bits != 16)
        throw std::invalid_argument("bits is " + std::to_string(bits) + ", expected 8 or 16");
    if (values.size() % compress_block != 0 ||
        bytes.size() != compressed_bytes(values.size(), bits)) {
        throw std::invalid_argument("there are " + std::to_string(bytes.size()) + " bytes for " +
                                    std::to_string(values.size()) +
                                    " floats, expected compressed_bytes() of whole blocks");
    }
}

}  // namespace

Step SharedStep::operator()(int64_t batch, bool finished) const {
    Step result;
    communicator.collective(
        "step", false, nb::none(), {}, [&](ShmCommunicator& shm, double timeout) {
            result = step(shm, parameters, bucket, batch, finished, average, pace, timeout);
        });
    return result;
}

void bind_update(nb::module_& module) {
    module.attr("LEAST_VARIANCE") = least_variance;
    nb::list factors;
    for (const CapFactor& entry : cap_factors) {
        factors.append(nb::make_tuple(entry.smallest_batch, entry.factor));
    }
    module.attr("CAP_FACTORS") = nb::tuple(factors);
    module.def("cap_factor", &cap_factor, "batch"_a,
               "Return the engine's cap factor for a batch size.");

    nb::class_<Contribution>(module, "Contribution", "The contribution of one rank to a step.")
        .def(nb::init<int64_t, bool, bool>(), "batch"_a, "finite"_a = true, "finished"_a = false)
        .def_ro("batch", &Contribution::batch)
        .def_ro("finite", &Contribution::finite)
        .def_ro("finished", &Contribution::finished);
    nb::class_<Agreement>(module, "Agreement", "The result of all ranks' contributions to a step.")
        .def(nb::init<const std::vector<Contribution>&>(), "ranks"_a)
        .def_ro("batch", &Agreement::batch)
        .def_ro("active", &Agreement::active)
        .def_ro("not_finite", &Agreement::not_finite)
        .def_ro("all_finished", &Agreement::all_finished)
        .def_prop_ro("applies", &Agreement::applies)
        .def("divisor", &Agreement::divisor, "average"_a)
        .def("capped_as", &Agreement::capped_as, "average"_a,
             "Return the batch size whose cap factor holds for the sum, or the mean, of deltas.");
    nb::class_<Pace>(module, "Pace",
                     "The times that the ranks take for their own work, between two exchanges.")
        .def(nb::init<>())
        .def("own", &Pace::own, "Return the nanoseconds since this rank's last exchange.")
        .def(
            "end",
            [](Pace& self, const std::vector<int64_t>& times) {
                self.add(times.size(), [&](size_t r) { return times[r]; });
                self.restart();
            },
            "times"_a, "End an exchange in which the ranks have sent each other these times.")
        .def_prop_ro("totals", &Pace::totals,
                     "The sums of each rank's times since the number of ranks changed.")
        .def_prop_ro("exchanges", &Pace::exchanges, "The number of exchanges since then.");
    nb::class_<SharedStep>(module, "SharedStep",
                           "The step of the ranks of a host over their shared memory: one "
                           "collective that agrees, reduces, caps and applies.")
        .def(
            "__init__",
            [](SharedStep* self, PyShmCommunicator& communicator, const Parameters& parameters,
               const Floats& bucket, bool average, Pace& pace) {
                new (self) SharedStep{communicator, parameters, checked(parameters, bucket),
                                      average, pace};
            },
            "communicator"_a, "parameters"_a, "bucket"_a, "average"_a, "pace"_a,
            nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
            nb::keep_alive<1, 6>(), "``bucket`` is memory that the communicator has allocated.")
        .def(
            "__call__",
            [](const SharedStep& self, int64_t batch, bool finished) {
                Step step = self(batch, finished);
                return std::make_pair(step.agreement, step.culprit);
            },
            "batch"_a, "finished"_a,
            "Apply the deltas of all ranks. ``batch`` is the number of samples behind this rank's; "
            "0: "
            "it has none. Returns the agreement, and this rank's first layer with a delta that is "
            "NaN or infinite, or \"\".");
    module.attr("COMPRESS_BLOCK") = compress_block;
    module.def(
        "compressed_bytes", &compressed_bytes, "count"_a, "bits"_a,
        "Return the bytes of ``count`` floats, a multiple of COMPRESS_BLOCK, in 8 or 16 bits.");
    module.def(
        "compress",
        [](Floats values, int bits, Bytes out) {
            check_compressed(values, bits, out);
            nb::gil_scoped_release unlocked;
            compress(values.data(), values.size(), bits, out.data());
        },
        "values"_a, "bits"_a, "out"_a,
        "Write ``values`` in 8 or 16 bits each; the rounding errors stay in ``values``.");
    module.def(
        "add_decompressed",
        [](Bytes bytes, int bits, Floats values) {
            check_compressed(values, bits, bytes);
            nb::gil_scoped_release unlocked;
            add_decompressed(bytes.data(), values.size(), bits, values.data());
        },
        "bytes"_a, "bits"_a, "values"_a,
        "Add the floats that `compress` has written to ``values``.");
    module.def(
        "shards",
        [](size_t size, int ranks) {
            std::vector<std::pair<size_t, size_t>> result;
            for (int r = 0; r < ranks; ++r) {
                const Shard shard = shard_of(size, sizeof(float), r, ranks);
                result.emplace_back(shard.begin, shard.count);
            }
            return result;
        },
        "size"_a, "ranks"_a, "Return the (begin, count) of each rank's part of the parameters.");
}

}  // namespace tagi_ddp
