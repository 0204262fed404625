"""Reads and writes one attribute of many objects in one compiled loop, as each step does with every tensor.

Attributes that C types define are called through their descriptors' own functions, found once, which skips the interpreter's
look-up; other attributes are looked up as usual, with the same effect. Objects of any type work.
"""

from cpython.object cimport PyObject, PyTypeObject

cdef extern from "Python.h":
    ctypedef object (*fps_getter)(object, void *)
    ctypedef int (*fps_setter)(object, object, void *) except -1

    ctypedef struct PyGetSetDef:
        fps_getter get
        fps_setter set
        void *closure

    ctypedef struct PyGetSetDescrObject:
        PyGetSetDef *d_getset

    PyTypeObject PyGetSetDescr_Type
    PyTypeObject *Py_TYPE(object)


cdef class Attribute:
    """The attribute `name` of objects of one type.

    >>> class Point:
    ...     x = 0
    >>> points = [Point(), Point()]
    >>> Attribute("x", points).set(points, [1, 2])
    >>> Attribute("x", points).are(points, [1, 3])
    1
    """

    cdef object name
    cdef PyTypeObject *type     # whose objects `definition` belongs to
    cdef PyGetSetDef *definition
    cdef object keep            # the descriptor, which lives as long as its type

    def __init__(self, str name not None, list objects not None):
        self.name = name
        self.definition = NULL
        types = {type(each) for each in objects}
        if len(types) != 1:
            return
        owner = next(iter(types))
        found = next((base.__dict__[name] for base in owner.__mro__ if name in base.__dict__), None)
        is_plain = owner.__getattribute__ is object.__getattribute__ and owner.__setattr__ is object.__setattr__
        if found is None or Py_TYPE(found) != &PyGetSetDescr_Type or not is_plain:
            return
        self.keep = found
        self.type = <PyTypeObject *> owner
        self.definition = (<PyGetSetDescrObject *> <PyObject *> found).d_getset

    cdef inline object _get(self, object each):
        if self.definition != NULL and Py_TYPE(each) == self.type:
            return self.definition.get(each, self.definition.closure)
        return getattr(each, self.name)

    cdef inline int _set(self, object each, object value) except -1:
        if self.definition != NULL and Py_TYPE(each) == self.type and self.definition.set != NULL:
            return self.definition.set(each, value, self.definition.closure)
        setattr(each, self.name, value)
        return 0

    def set(self, list objects not None, list values not None):
        """Give the i-th object the i-th value. Raises ValueError for lists of different lengths."""
        cdef Py_ssize_t i
        if len(objects) != len(values):
            raise ValueError(f"expected {len(objects)} values, found {len(values)}")
        for i in range(len(objects)):
            self._set(objects[i], values[i])

    def set_all(self, list objects not None, value):
        """Give every object the same value."""
        cdef Py_ssize_t i
        for i in range(len(objects)):
            self._set(objects[i], value)

    def get(self, list objects not None):
        """Return the values of all objects as a list."""
        cdef Py_ssize_t i
        return [self._get(objects[i]) for i in range(len(objects))]

    def are(self, list objects not None, list values not None):
        """Return the index of the first object whose value is not the list's own object (or, as an int, equal), or -1."""
        cdef Py_ssize_t i
        cdef object found
        if len(objects) != len(values):
            raise ValueError(f"expected {len(objects)} values, found {len(values)}")
        for i in range(len(objects)):
            found = self._get(objects[i])
            if found is not values[i] and not (type(found) is int and found == values[i]):
                return i
        return -1
