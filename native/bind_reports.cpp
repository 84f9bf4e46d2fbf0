// The Python bindings of reports, without logic. An op's report is an object; the structs in it are named
// tuples, whose classes and docstrings live in Python. Their fields are those that the structs list. This is
// checked when the classes are registered.
#include "bind_reports.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <concepts>
#include <string>
#include <type_traits>

#include "codec/hash.hpp"
#include "protocol/endpoint.hpp"
#include "protocol/reports/record.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tailcut;

namespace {

// The structs that are named tuples in Python.
template <typename T>
concept Mirrored = std::same_as<T, Traffic> || std::same_as<T, StageReport> || std::same_as<T, LinkStage> ||
                   std::same_as<T, LinkReport> || std::same_as<T, LateCompletion> || std::same_as<T, LrScale>;

template <Mirrored T>
PyTypeObject* mirror = nullptr;  // the struct's class in Python, which lives as long as the module

template <Listed T>
std::vector<std::string> names_of() {
    std::vector<std::string> names;
    T::visit_fields([&](const char* name, auto) { names.emplace_back(name); });
    return names;
}

template <Mirrored T>
void adopt(nb::handle python_class) {
    if (nb::cast<std::vector<std::string>>(python_class.attr("_fields")) != names_of<T>())
        throw nb::type_error(
            (nb::cast<std::string>(python_class.attr("__name__")) + " does not have the native fields")
                .c_str());
    mirror<T> = reinterpret_cast<PyTypeObject*>(nb::borrow(python_class).release().ptr());
}

const char* name(wire::Stage stage) { return stage == wire::Stage::kScatter ? "scatter" : "gather"; }

// Takes ownership of what a function of Python's API has made.
nb::object owned(PyObject* made) {
    if (!made) nb::raise_python_error();
    return nb::steal(made);
}

// Times become seconds, or None where they are not known; enums become their names.
template <typename T>
nb::object python_of(const T& value) {
    if constexpr (Mirrored<T>) {
        constexpr Py_ssize_t kFields = [] {
            Py_ssize_t fields = 0;
            T::visit_fields([&](const char*, auto) { ++fields; });
            return fields;
        }();
        if (!mirror<T>)
            throw nb::import_error("reports are made of the classes in tailcut.mirror: import it");
        const nb::object values = owned(PyTuple_New(kFields));
        Py_ssize_t at = 0;
        T::visit_fields([&](const char*, auto field) {
            PyTuple_SET_ITEM(values.ptr(), at++, python_of(value.*field).release().ptr());
        });
        const nb::object arguments = owned(PyTuple_Pack(1, values.ptr()));
        return owned(PyTuple_Type.tp_new(mirror<T>, arguments.ptr(), nullptr));
    } else if constexpr (std::same_as<T, SinceEntry>) {
        return value ? python_of(*value) : nb::none();
    } else if constexpr (std::same_as<T, Duration>) {
        return nb::float_(static_cast<double>(value) / 1e9);
    } else if constexpr (std::is_enum_v<T>) {
        return owned(PyUnicode_InternFromString(name(value)));
    } else {
        return nb::cast(value);
    }
}

template <typename T>
constexpr bool kIsTuple = Mirrored<T>;
template <typename T>
constexpr bool kIsTuple<std::vector<T>> = Mirrored<T>;

template <Mirrored T>
nb::object python_of(const std::vector<T>& values) {
    const nb::object all = owned(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (std::size_t k = 0; k < values.size(); ++k)
        PyTuple_SET_ITEM(all.ptr(), static_cast<Py_ssize_t>(k), python_of(values[k]).release().ptr());
    return all;
}

using Counts = nb::typed<nb::dict, nb::str, std::uint64_t>;
using RejectedCounts = std::array<std::uint64_t, wire::kRejectReasons>;

Counts by_reason(const RejectedCounts& counts) {
    Counts reasons;
    for (std::size_t k = 0; k < wire::kRejectReasons; ++k)
        reasons[wire::name(static_cast<wire::Reject>(k))] = counts[k];
    return reasons;
}

// Binds every field that the struct lists as read-only. A field that is a named tuple is made anew whenever
// it is read.
template <Listed T>
nb::class_<T> bind_fields(nb::module_& m, const char* class_name) {
    nb::class_<T> bound(m, class_name);
    T::visit_fields([&](const char* name, auto field) {
        using Value = std::remove_cvref_t<decltype(std::declval<T>().*field)>;
        if constexpr (std::same_as<Value, RejectedCounts>)
            bound.def_prop_ro(name, [field](const T& self) { return by_reason(self.*field); });
        else if constexpr (std::is_enum_v<Value>)
            bound.def_prop_ro(name, [field](const T& self) { return nb::str(python_of(self.*field)); });
        else if constexpr (kIsTuple<Value>)
            bound.def_prop_ro(name, [field](const T& self) {
                return nb::steal<nb::any>(python_of(self.*field).release());
            });
        else
            bound.def_ro(name, field);
    });
    return bound;
}

nb::bytes granule_bytes(const GranuleSet& set, std::uint32_t granules) {
    std::string flags(granules, '\0');
    for (std::uint32_t g = 0; g < granules; ++g) flags[g] = static_cast<char>(set.test(g));
    return nb::bytes(flags.data(), flags.size());
}

}  // namespace

void bind_reports(nb::module_& m) {
    m.def(
        "mirror_reports",
        [](nb::handle traffic, nb::handle stage, nb::handle link_stage, nb::handle link, nb::handle late,
           nb::handle lr_scale) {
            adopt<Traffic>(traffic);
            adopt<StageReport>(stage);
            adopt<LinkStage>(link_stage);
            adopt<LinkReport>(link);
            adopt<LateCompletion>(late);
            adopt<LrScale>(lr_scale);
        },
        "traffic"_a, "stage"_a, "link_stage"_a, "link"_a, "late"_a, "lr_scale"_a,
        "The classes of named tuples that reports are made of.");
    bind_fields<Energies>(m, "Energies").def(nb::init<>());
    bind_fields<OpReport>(m, "OpReport")
        .def_prop_ro("closed_at", &OpReport::closed_at)
        .def("contributions",
             [](const OpReport& report) {  // by rank, a byte per granule of the own shard
                 std::vector<nb::bytes> all;
                 for (const auto& set : report.contributions)
                     all.push_back(granule_bytes(set, report.granules[report.own_shard]));
                 return all;
             })
        .def("record",
             [](const OpReport& report) {  // as the ledger has it
                 const std::vector<std::byte> bytes = record_of(report);
                 return nb::bytes(bytes.data(), bytes.size());
             })
        .def("held", [](const OpReport& report) {  // by shard, a byte per granule
            std::vector<nb::bytes> all;
            for (Rank shard = 0; shard < report.held.size(); ++shard)
                all.push_back(granule_bytes(report.held[shard], report.granules[shard]));
            return all;
        });
    m.def("record_schema", &record_schema);
    m.def(
        "hash_of",
        [](const nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& bytes) {
            return codec::hash_of(std::as_bytes(std::span(bytes.data(), bytes.size())));
        },
        "bytes"_a);
    bind_fields<Counters>(m, "Counters").def_static("fields", &names_of<Counters>);
}
