//! The address of the last sender, as the kernel and as Python represent it.
//!
//! A server that answers a datagram usually passes back the address object that `datagram_received` got. The native
//! address of that object is known here, so the object need not be parsed. And when a peer sends several datagrams in a
//! row, the object for its address is made only once.

use std::cell::RefCell;

use grapeshot_core::sys::socket::Address;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::binding::object_cell::ObjectCell;
use crate::binding::socket_object;

pub(super) struct Senders {
    address: RefCell<Option<Address>>,
    /// The Python object for `address`. It is a tuple, a str or a bytes object, so it cannot change.
    object: ObjectCell,
}

impl Senders {
    pub(super) const fn new() -> Self {
        Self {
            address: RefCell::new(None),
            object: ObjectCell::empty(),
        }
    }

    /// The Python object for the sender of a datagram.
    #[inline]
    pub(super) fn object_of<'py>(&self, py: Python<'py>, sender: Address) -> PyResult<Bound<'py, PyAny>> {
        if self.address.borrow().as_ref() == Some(&sender)
            && let Some(object) = self.object.get(py)
        {
            return Ok(object);
        }
        let object = socket_object::address_object(py, &sender)?;
        if object.is_none() {
            return Ok(object); // A sender without a name cannot be answered, so the previous sender is kept.
        }
        self.object.set(object.clone());
        self.address.replace(Some(sender));
        Ok(object)
    }

    /// The address of the last sender, if `object` is the object for it.
    #[inline]
    pub(super) fn address_of(&self, object: *mut ffi::PyObject) -> Option<Address> {
        if self.object.as_ptr() != object {
            return None;
        }
        self.address.borrow().clone()
    }

    /// The cell, for the collector.
    pub(super) fn cell(&self) -> &ObjectCell {
        &self.object
    }
}
